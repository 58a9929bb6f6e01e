"""
What becomes a document: files, folders and patterns, text in every encoding that people have, and
jsonl and parquet as they are in the world. Each is prepared by the command and read back.
"""

import codecs
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documents import check_documents, documents, manifest_of, stored_texts, write_parquet
from program import Result, run

FILLING = [f"filling {n} " * 9 for n in range(60)]  # so that each split has enough


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare_rows(*arguments) -> Result:
    flags = ["--tokenizer=byte", "--val_tokens=1", "--order=prefix", "--out=out"]
    return run("data/prepare_fineweb.py", *arguments, *flags)


def prepare_text(*arguments) -> Result:
    return run("data/prepare_text.py", *arguments, "--out=out")


def rows_of(source, *flags: str) -> list[str]:
    """The documents of files of rows."""
    result = prepare_rows(f"--source={source}", *flags)
    assert result.code == 0, result.err
    return stored_texts(Path("out"), "val") + stored_texts(Path("out"), "train")


def write_lines(name: str, lines: list[bytes]) -> str:
    content = b"\n".join(lines)
    if name.endswith(".gz"):
        content = gzip.compress(content)
    if name.endswith(".zst"):
        content = pytest.importorskip("zstandard").compress(content)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content)
    return name


# -----------------------------------------------------------------------------
# Which files


def test_files_folders_and_patterns_in_the_order_given_each_once():
    for name in ("b.txt", "a.md", "deep/c.py", "deep/D.TXT", "deep/photo.jpg"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(f"{name} " * 30)
    Path("deep/e.jsonl").write_text(json.dumps(dict(text="in a row " * 9)))
    result = prepare_text("b.txt", "deep", "*.md", "b.txt", "deep/c.py", "--val_fraction=0.2")
    assert result.code == 0, result.err
    assert "1 files are not read (.jpg), such as deep/photo.jpg" in result.err
    order = ["b.txt", "deep/D.TXT", "deep/c.py", "deep/e.jsonl", "a.md"]
    assert [*manifest_of(Path("out"))["files"]] == order
    texts = [f"{name} " * 30 for name in order]
    texts[3] = "in a row " * 9
    check_documents(*(stored_texts(Path("out"), split) for split in ("val", "train")), texts)


def test_home_may_be_written_as_a_tilde(work, monkeypatch):
    monkeypatch.setenv("HOME", str(work))
    Path("a.txt").write_text("a line\n" * 300)
    assert run("data/prepare_text.py", "a.txt", "--out=~/mine").code == 0
    assert Path("mine/manifest.json").exists()


# -----------------------------------------------------------------------------
# Text files

GERMAN = "Über die Größe der Straße – 5 €.\n" * 30
JAPANESE = "名前はまだ無い。\n" * 40
ENCODINGS = {
    "utf-8": (GERMAN.encode(), ""),
    "with a mark": (codecs.BOM_UTF8 + GERMAN.encode(), ""),
    "Windows' line ends": (GERMAN.replace("\n", "\r\n").encode(), ""),
    "an old Mac's": (GERMAN.replace("\n", "\r").encode(), ""),
    "UTF-16": (GERMAN.encode("utf-16"), ""),
    "UTF-16, other end first": (codecs.BOM_UTF16_BE + GERMAN.encode("utf-16-be"), ""),
    "cp1252": (GERMAN.encode("cp1252"), "read as cp1252: 'Über Größe Straße"),
}


@pytest.mark.parametrize("content, said", ENCODINGS.values(), ids=ENCODINGS)
def test_text_of_any_usual_encoding_is_read_and_a_guess_is_said(content, said):
    Path("a.txt").write_bytes(content)
    result = prepare_text("a.txt", "--val_fraction=0.2")
    assert result.code == 0
    assert said in result.err and bool(said) == bool(result.err)
    splits = [stored_texts(Path("out"), split) for split in ("val", "train")]
    check_documents(*splits, [GERMAN])


@pytest.mark.parametrize("encoding", ["shift_jis", "utf-16-le", "iso2022_jp"])
def test_another_encoding_is_given_for_what_is_not_unicode(encoding):
    Path("a.txt").write_bytes(JAPANESE.encode(encoding))
    Path("b.txt").write_bytes(GERMAN.encode())
    result = prepare_text("a.txt", "b.txt", f"--encoding={encoding}", "--val_fraction=0.2")
    assert result.code == 0, result.err
    assert "名前は" in result.err and "b.txt" not in result.err
    splits = [stored_texts(Path("out"), split) for split in ("val", "train")]
    check_documents(*splits, [JAPANESE, GERMAN])


UNREADABLE = {
    # all of its bytes are letters of cp1252
    "one broken byte": (GERMAN.encode() + b"\xff" + GERMAN.encode(), "line 31 is not utf-8"),
    "half a letter": (JAPANESE.encode("utf-16") + b"a", "line 41 is not utf-16"),
    "UTF-16 without a mark": ("a line\n".encode("utf-16-le") * 99, "NULs"),
    "encoded twice": (GERMAN.encode("cp1252").decode("latin1").encode(), "control characters"),
    "an image": (bytes(range(256)) * 99, "a.txt"),
}


@pytest.mark.parametrize("content, said", UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_no_text_is_refused(content, said):
    Path("a.txt").write_bytes(content)
    result = prepare_text("a.txt")
    assert result.code == 2 and result.err.count("\n") == 1
    assert said in result.err and "a.txt" in result.err and not Path("out").exists()


def test_blanks_are_no_document_in_any_form():
    Path("a.txt").write_text(" \n\t\n")
    Path("b.md").write_text("")
    rows = [dict(text=text) for text in ["", " \n", *FILLING]]
    Path("c.jsonl").write_text("".join(f"{json.dumps(row)}\n\n  \n" for row in rows))
    write_parquet(Path("d.parquet"), ["  ", None, *FILLING])
    result = prepare_text("a.txt", "b.md", "c.jsonl", "d.parquet")
    assert result.code == 0
    # blank files and lines are no rows, so they do not count
    assert result.err.startswith("warning: ") and "4 of 124 rows hold no text" in result.err
    splits = [stored_texts(Path("out"), split) for split in ("val", "train")]
    check_documents(*splits, FILLING * 2)


# -----------------------------------------------------------------------------
# Rows

ROWS = {
    "other keys, nested": (b'{"id": 7, "meta": {"a": [1, {"text": 2}]}, "text": "words"}', "words"),
    "a byte-order mark": (b'\xef\xbb\xbf{"text": "words"}', "words"),
    "Windows' line end": (b'{"text": "words"}\r', "words"),
    "escapes": (rb'{"text": "caf\u00e9 \ud83d\ude42\n"}', "café 🙂\n"),
    "a lone surrogate": (rb'{"text": "a \ud83d b"}', "a ? b"),
    "letters as they are": ('{"text": "漢字"}'.encode(), "漢字"),
    "null": (b'{"text": null}', None),
    "another field": (b'{"body": "words"}', None),
    "a number": (b'{"text": 5}', None),
    "a list": (b'{"text": ["words"]}', None),
    "blank": (b" \t", None),
}


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "jsonl.gz", "jsonl.zst"])
def test_a_row_of_jsonl_is_an_object_with_a_text(ending):
    lines = [line for line, _ in ROWS.values()]
    lines += [json.dumps(dict(text=text)).encode() for text in FILLING]
    expected = [text for _, text in ROWS.values() if text] + FILLING
    assert rows_of(write_lines(f"a.{ending}", lines)) == expected


BROKEN = {
    "cut": (b'{"text": "cut', "Unterminated"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "Extra data"),
    "a list": (b'[{"text": "a"}]', "jq -c '.[]'"),
    "a string": (b'"text"', "no JSON object"),
    "too deep": (b'{"a":' * 100_000, "recursion"),
    "Latin-1": ('{"text": "café"}'.encode("latin-1"), "iconv"),
    "UTF-16": ('{"text": "words"}'.encode("utf-16"), "iconv"),
}


@pytest.mark.parametrize("line, said", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("prepare", [prepare_rows, prepare_text])
def test_a_broken_line_is_named_by_its_number_in_the_file(prepare, line, said):
    """Behind a hundred rows and a blank line."""
    good = [json.dumps(dict(text=text)).encode() for text in (FILLING * 2)[:100]]
    write_lines("a.jsonl", [*good, b"", line, *good])
    source = "--source=a.jsonl" if prepare is prepare_rows else "a.jsonl"
    result = prepare(source)
    assert result.code == 2 and result.err.count("\n") == 1
    assert result.err.startswith("error: a.jsonl: line 102 is no JSON object (")
    assert said in result.err and not Path("out").exists()


def test_the_text_may_be_in_another_field():
    rows = [dict(body=text, text=1) for text in FILLING]
    Path("source").mkdir()
    Path("source/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_parquet(Path("source/b.parquet"), FILLING, column="body")
    assert rows_of("source", "--text_field=body") == FILLING * 2
    assert manifest_of(Path("out"))["text_field"] == "body"


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), "dictionary"])
def test_parquet_holds_text_in_any_of_its_types(kind):
    texts = ["café", None, *FILLING]
    column = pa.array(texts)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    pq.write_table(pa.table({"text": column}), "a.parquet", row_group_size=7)
    assert rows_of("a.parquet") == ["café", *FILLING]


def test_invalid_utf8_in_parquet_becomes_the_replacement_character():
    broken = pa.array([b"caf\xe9 \xff", b"fine"] * 50, pa.binary())
    text = pa.StringArray.from_buffers(len(broken), *broken.buffers()[1:])
    pq.write_table(pa.table({"text": text}), "a.parquet")
    assert rows_of("a.parquet") == ["caf\ufffd \ufffd", "fine"] * 50


def test_rows_without_text_are_counted_and_a_file_that_is_mostly_without_is_refused():
    """Also a file behind others, when it is reached."""
    texts = [text for text in documents(1400) if text]
    rows = [dict(text=text) for text in texts]
    without = [dict(body="w", tags=[])] * 1100
    Path("source").mkdir()

    def write(rows: list[dict]) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        Path("source/b.jsonl").write_text(lines)

    Path("source/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:1100]))
    write(rows[1100:] + without[:200])
    result = prepare_rows("--source=source")
    assert result.code == 0
    (line,) = result.err.splitlines()
    assert line == "warning: source: 200 of 1,593 rows hold no text in the field and are left out"
    write(without)
    Path("out/manifest.json").rename("manifest.json")
    result = run(
        "data/prepare_fineweb.py",
        "--source=source",
        "--tokenizer=byte",
        "--val_tokens=1",
        "--order=prefix",
        "--out=2",
    )
    assert result.code == 1
    assert "source/b.jsonl: 1,000 of the first 1,000 rows hold no text" in result.err
    assert "fields: body (str), tags (list); give --text_field=NAME" in result.err
    Path("source/a.jsonl").unlink()
    result = run("data/prepare_fineweb.py", "--source=source", "--tokenizer=byte", "--out=3")
    assert result.code == 2 and "rows hold no text" in result.err and not Path("3").exists()


def test_a_file_that_was_cut_ends_in_the_librarys_own_words():
    packed = gzip.compress(b'{"text": "a"}\n' * 99)
    Path("a.jsonl.gz").write_bytes(packed[:-9])
    result = prepare_rows("--source=a.jsonl.gz")
    assert result.code == 2 and result.err.count("\n") == 1
    assert "a.jsonl.gz: EOFError: Compressed file ended before" in result.err


def test_text_that_would_fill_the_memory_is_sent_to_jsonl():
    """A gigabyte and a byte, of which the disk holds nothing."""
    with open("a.txt", "wb") as file:
        file.truncate(10**9 + 1)
    result = prepare_text("a.txt")
    assert result.code == 2
    assert "1 GB" in result.err and "prepare_fineweb.py --source=FILE.jsonl" in result.err
