"""
Check what becomes a document: files, folders and patterns, text in common encodings, jsonl and
parquet. The commands prepare each source, and the tests read the shards back.
"""

import gzip
import json
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documents import check_folder, manifest_of, on_hub, stored_texts, write_parquet
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from program import Result, refused, run

from data.text import Place, Source

FILLING = [f"filling {n} " * 9 for n in range(60)]  # so that each split has enough text


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare_rows(source, *flags: str) -> Result:
    """Prepare files of rows as a dataset of the hub, which may be smaller than a text."""
    files = sorted(Path(source).iterdir()) if Path(source).is_dir() else [source]
    hub = ("--dataset=org/name", "--tokenizer=byte", "--val_fraction=0.01", "--out=out")
    with on_hub(*files), mock.patch("random.Random.shuffle", lambda *_: None):
        return run("data/prepare_fineweb.py", *hub, *flags)


def prepare_text(*arguments) -> Result:
    return run("data/prepare_text.py", *arguments, "--out=out")


# -----------------------------------------------------------------------------
# Any text, in any form


def jsonl(texts: list[str]) -> bytes:
    return b"".join(b'{"text": %s}\n' % json.dumps(text).encode() for text in texts)


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


def in_two(pack, content: bytes) -> bytes:
    """Pack the two halves of a file, which are then behind one another."""
    return pack(content[: len(content) // 2]) + pack(content[len(content) // 2 :])


def parquet_of(rows: list, column: str = "text", kind: pa.DataType | None = None) -> bytes:
    table = pa.table({column: pa.array(rows, pa.binary() if kind is None else kind)})
    pq.write_table(table, buffer := pa.BufferOutputStream(), row_group_size=7)
    return buffer.getvalue().to_pybytes()


FORMS = {  # the name of a file, and what it holds if these are its texts
    "a.jsonl": jsonl,
    "a.ndjson": jsonl,
    "a.jsonl.gz": lambda texts: in_two(gzip.compress, jsonl(texts)),
    "a.json.gz": lambda texts: gzip.compress(jsonl(texts)),
    "a.ndjson.zst": lambda texts: zstd(jsonl(texts)),
    "a.jsonl.zst": lambda texts: in_two(zstd, jsonl(texts)),
    "binary.parquet": lambda texts: parquet_of([text.encode() for text in texts]),
    "string.parquet": lambda texts: parquet_of(texts, kind=pa.string()),
    "large.parquet": lambda texts: parquet_of(texts, kind=pa.large_string()),
    "table.parquet": lambda texts: parquet_of(texts, kind=pa.dictionary(pa.int8(), pa.string())),
    "a.txt": lambda texts: MARK.join(texts).encode(),
    "marked.txt": lambda texts: MARK.join(texts).encode("utf-8-sig"),
    "utf16.txt": lambda texts: MARK.join(texts).encode("utf-16"),
    # these hold one text
    "utf16_be.md": lambda texts: f"\ufeff{''.join(texts)}".encode("utf-16-be"),
    "windows.md": lambda texts: "".join(texts).replace("\n", "\r\n").encode(),
    "old_mac.py": lambda texts: "".join(texts).replace("\n", "\r").encode(),
}
MARK = "<|endoftext|>\n"
LETTERS = st.characters(codec="utf-8", exclude_characters="\0\r\ufeff")


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
@given(texts=st.lists(st.text(LETTERS), min_size=1, max_size=20))
@example(texts=["Über die Größe der Straße – 5 €.\n", "", "漢字 🙂"])
def test_any_text_is_read_as_it_is_in_any_form(name, texts):
    Path(name).write_bytes(FORMS[name](texts))
    read = [text for _, text in Source([name]).rows(Place()) if text]
    texts = ["".join(texts)] if name.endswith((".md", ".py")) else texts
    assert read == [text for text in texts if text and not text.isspace()]


# -----------------------------------------------------------------------------
# Which files


def test_files_folders_and_patterns_are_read_in_the_order_given_and_once_each():
    for name in ("b.txt", "a.md", "deep/c.py", "deep/D.TXT", "deep/photo.jpg", "deep/.git/f.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(f"{name} " * 30)
    Path("deep/e.jsonl").write_text(json.dumps(dict(text="in a row " * 9)))
    Path("deep/latest.txt").symlink_to("../b.txt")
    Path("deep/snapshot.txt").hardlink_to("b.txt")
    Path("deep/snapshot.py").hardlink_to("deep/c.py")
    result = prepare_text("b.txt", "deep", "*.md", "b.txt", "deep/c.py", "--val_fraction=0.2")
    assert result.code == 0, result.err
    assert "deep: 1 files are left out, such as deep/photo.jpg" in result.err
    order = ["b.txt", "deep/D.TXT", "deep/c.py", "deep/e.jsonl", "a.md"]  # each by its first name
    assert [*manifest_of(Path("out"))["files"]] == order
    texts = {name: f"{name} " * 30 for name in order} | {"deep/e.jsonl": "in a row " * 9}
    check_folder(Path("out"), [*texts.values()])


@pytest.mark.parametrize("packed", ["posts.jsonl.gz", "posts.jsonl.zst"])
def test_a_file_beside_its_packed_copy_is_refused(packed):
    """Else training would read the text twice, and half of the validation text too."""
    Path("posts").mkdir()
    for name in ("posts.jsonl", packed, "other.jsonl.gz"):
        Path("posts", name).write_text(json.dumps(dict(text="words " * 90)))
    refused(prepare_text("posts"), "posts/posts.jsonl, ", f"posts/{packed}: the same text twice")


def test_linked_folders_are_read_once_and_a_broken_link_to_text_is_refused():
    Path("notes").mkdir()
    Path("elsewhere/deep").mkdir(parents=True)
    Path("elsewhere/deep/more.txt").write_text("more " * 200)
    Path("notes/linked").symlink_to(Path("elsewhere").absolute())
    for name in ("back", "again"):  # two links that lead back make 2^40 paths
        Path("elsewhere", name).symlink_to(Path("elsewhere").absolute())
    assert prepare_text("notes", "--val_fraction=0.2").code == 0
    check_folder(Path("out"), ["more " * 200])
    Path("notes/lost.txt").symlink_to("/mnt/stick/away")
    result = run("data/prepare_text.py", "notes")
    assert "notes/lost.txt: No such file" in result.err


@pytest.mark.parametrize("name", ["enwik8", "table/a.csv", "a.json", "saved/a.arrow"])
def test_a_file_that_cannot_be_read_is_refused_with_the_kinds_that_can(name):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("words " * 90)
    for word in (name, f"{name[:3]}*", name.partition("/")[0]):
        refused(prepare_text(word), word, ".txt, .md, .py, .parquet, .jsonl")


# -----------------------------------------------------------------------------
# Text files

GERMAN = "Über die Größe der Straße – 5 €.\n" * 30


def test_a_text_file_is_split_into_documents_at_end_of_text():
    stories = [f"Story {n}.\nThe end.\n" for n in range(300)]
    Path("a.txt").write_bytes("<|endoftext|>\r\n".join([*stories, " \n"]).encode())
    assert prepare_text("a.txt").code == 0
    check_folder(Path("out"), stories)


@pytest.mark.parametrize("name", ["a.py", "a.md", "a.jsonl"])
def test_end_of_text_in_code_markdown_or_jsonl_stays_in_the_text(name):
    text = "END = '<|endoftext|>'\n" * 30
    Path(name).write_text(json.dumps(dict(text=text)) if name == "a.jsonl" else text)
    assert prepare_text(name, "--val_fraction=0.2").code == 0
    check_folder(Path("out"), [text])


def test_blank_text_and_broken_utf8_make_no_document_in_any_format_and_are_counted():
    Path("a.txt").write_text(" \n\t\n")
    Path("b.md").write_text("")
    rows = [dict(text=text) for text in ["", " \n", *FILLING]]
    Path("c.jsonl").write_text("".join(f"{json.dumps(row)}\n\n  \n" for row in rows))
    texts = [text.encode() for text in FILLING]
    Path("d.parquet").write_bytes(parquet_of([b"  ", None, b"caf\xe9", *texts]))
    result = prepare_text("a.txt", "b.md", "c.jsonl", "d.parquet")
    assert result.code == 0
    # blank files and lines are not rows, so they do not count
    assert result.err.startswith("warning: ") and "5 of 125 rows hold no text" in result.err
    check_folder(Path("out"), FILLING * 2)


# -----------------------------------------------------------------------------
# Rows

ROWS = {  # lines, and the text in them
    b'{"id": 7, "meta": {"a": [1, {"text": 2}]}, "text": "words"}': "words",
    b'\xef\xbb\xbf{"text": "words"}': "words",
    b'{"text": "words"}\r': "words",
    rb'{"text": "caf\u00e9 \ud83d\ude42\n"}': "café 🙂\n",
    rb'{"text": "a \ud83d b"}': "a ? b",  # a lone surrogate
    b'{"text": null}': None,
    b'{"body": "words"}': None,
    b'{"text": "caf\xe9"}': None,  # not UTF-8
    b'{"text": 5}': None,
    b'{"text": ["words"]}': None,
}
ROW_LINES = [json.dumps(dict(text=text)).encode() for text in FILLING]


def test_jsonl_rows_with_a_text_field_are_read_and_others_left_out():
    Path("a.jsonl").write_bytes(b"\n".join([*ROWS, *ROW_LINES]))
    assert prepare_rows("a.jsonl").code == 0
    check_folder(Path("out"), [*filter(None, ROWS.values()), *FILLING])


def among_rows(line: bytes) -> bytes:
    """Return a file with this line, as line 62, among good ones."""
    return b"\n".join([*ROW_LINES, b"", line, *ROW_LINES])


REFUSED = [  # a file, what it holds, words of the error
    ("cp1252.txt", GERMAN.encode("cp1252"), "utf-8 position 0 iconv"),
    ("one_broken_byte.txt", GERMAN.encode() + b"\xff" + GERMAN.encode(), "utf-8 decode iconv"),
    ("utf16_without_a_mark.txt", "a line\n".encode("utf-16-le") * 99, "NUL iconv"),
    ("cut.jsonl", among_rows(b'{"text": "cut'), "line 62"),
    ("two_objects.jsonl", among_rows(b'{"text": "a"} {"text": "b"}'), "line 62"),
    ("a_string.jsonl", among_rows(b'"text"'), "line 62"),
    ("too_deep.jsonl", among_rows(b'{"a":' * 100_000), "line 62"),
    ("another_field.jsonl", b'{"id": 1, "body": "words"}\n\n' * 1001, "--text_field=NAME id, body"),
    ("messages.jsonl", b'{"text": [{"role": "words"}]}\n' * 1001, "--text_field=NAME text"),
    ("cut_short.jsonl.gz", gzip.compress(among_rows(b""))[:-1], "Truncated"),
    ("cut_short.jsonl.zst", zstd(among_rows(b""))[:-1], "Truncated"),
    ("garbage.parquet", bytes(range(200)), "Parquet"),
    ("another_field.parquet", parquet_of([b"words"] * 60, "body"), "--text_field=NAME body"),
]


@pytest.mark.parametrize("name, content, words", REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_file_without_readable_text_is_refused_in_one_line(name, content, words):
    Path(name).write_bytes(content)
    code, _, err = prepare_text(name)
    assert code in (1, 2) and err.count("\n") == 1, err
    assert all(word in err for word in [f"error: {name}: ", *words.split(" ")]), err
    assert not list(Path("out").glob("*.bin"))


def test_the_text_field_flag_reads_the_text_from_another_field():
    write_parquet(Path("source/b.parquet"), FILLING, column="body")
    Path("source/a.jsonl").write_bytes(jsonl(FILLING).replace(b'"text"', b'"body"'))
    assert prepare_rows("source", "--text_field=body").code == 0
    check_folder(Path("out"), FILLING * 2)
    assert manifest_of(Path("out"))["text_field"] == "body"


@pytest.mark.parametrize("marks", [False, True], ids=["without marks", "with end-of-text"])
def test_a_large_text_file_is_read_in_pieces(marks, monkeypatch):
    """Normalise and decode each piece as a whole file, and keep a story that two pieces share."""
    lines = [f"{n} élan\r\n" for n in range(3000)]
    stories = ["".join(lines[at : at + 7]) for at in range(0, 3000, 7)]
    Path("a.txt").write_bytes(("<|endoftext|>" * marks).join(stories).encode())
    monkeypatch.setattr("data.text.LARGE_FILE", 1000)
    monkeypatch.setattr("data.text.PIECE", 10_000 if marks else 999)
    assert prepare_text("a.txt", "--val_fraction=0.2").code == 0
    if marks:
        check_folder(Path("out"), [story.replace("\r", "") for story in stories])
        return
    train, val = (stored_texts(Path("out"), split) for split in ("train", "val"))
    assert len(train) > 20 and all(text.endswith("\n") for text in train + val)
    assert sorted("".join(train + val).split()) == sorted("".join(lines).split())
