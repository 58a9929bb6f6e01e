"""
jsonl as it is in the world, and parquet: rows without the field, broken lines, and what continues
after one has been fixed.
"""

import gzip
import hashlib
import json
import time
from pathlib import Path

import numpy as np
import pytest
from documents import documents, serve_hub, write_parquet
from helpers import run_process, start_process

from common.console import RunError, UserError
from data import prepare_fineweb, prepare_text
from data.shards import read_manifest
from data.sources import FilesSource
from data.tokenizer import Tokenizer
from data.writer import Plan, prepare


def write_rows(path: Path, rows: list) -> Path:
    """A jsonl file; a str is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def texts_of(files: list[Path], **flags) -> list[str]:
    rows = FilesSource([str(file) for file in files], **flags)(0, 0)
    return [text for _, _, texts in rows for text in texts if text]


def stored(folder: Path) -> list[str]:
    """The documents of a byte dataset, those for validation first, read without any of our code."""
    files = sorted(folder.glob("*.bin"), key=lambda file: (file.name[0] == "t", file.name))
    ids = np.concatenate([np.fromfile(file, dtype="<u2", offset=1024) for file in files])
    return bytes(ids.tolist()).decode().split("\0")[1:]


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.glob("*.bin")}


def both_commands(source: Path, out: Path, *flags: str):
    """Each preparation of a source, with bytes for tokens: main and its arguments."""
    flags = [*flags, "--tokenizer=byte"]
    rows = [f"--source={source}", "--val_tokens=100", f"--out={out / 'rows'}"]
    yield prepare_fineweb.main, [*rows, *flags]
    yield prepare_text.main, [str(source), f"--out={out / 'text'}", *flags]


# -----------------------------------------------------------------------------
# Rows without the field


def test_most_rows_without_the_field_end_the_command_before_anything_is_written(tmp_path, script):
    rows = [{"text": "words"}] * 3 + [{"id": i, "body": "w", "tags": []} for i in range(1997)]
    source = write_rows(tmp_path / "posts.jsonl", rows)
    for main, flags in both_commands(source, tmp_path / "out"):
        code, _, (line,) = script(main, *flags)
        assert code == 2
        assert line == (
            f"error: 997 of 1,000 rows (99.7%) hold no text: {source}: row 4: no text in the "
            "field text; fields: id, body, tags; prepare with --text_field=NAME"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("without", [0, 28, 29])
def test_rows_without_text_are_counted_apart_from_blank_lines(tmp_path, script, without):
    """More than one in a hundred of all is a warning; the first ones are all as they should be."""
    rows = [{"text": f"row {i} "} for i in range(2000)]
    rows += ["", {"text": "w"}] * 400  # a blank line is no row
    kinds = [{"text": 5}, {"text": None}, {"text": ""}, {"text": " \n"}, {"text": ["c"]}]
    rows += (kinds * 6)[:without]
    source = write_rows(tmp_path / "a.jsonl", rows)
    warning = (
        f"warning: 29 of 2,829 rows (1.0%) hold no text and are left out: {source}: row 2,801: "
    )
    warning += "no text in the field text; fields: text"
    for main, flags in both_commands(source, tmp_path / "out"):
        code, _, err = script(main, *flags)
        assert code == 0 and err == ([warning] if without == 29 else [])


def test_rows_without_the_field_at_the_beginning_are_one_warning_too(tmp_path, script):
    source = write_rows(tmp_path / "a.jsonl", [{"body": "w"}] * 30 + [{"text": "words "}] * 1970)
    for main, flags in both_commands(source, tmp_path):
        code, _, (line,) = script(main, *flags)
        assert (
            code == 0 and "30 of 2,000 rows (1.5%) hold no text and" in line and ": row 1:" in line
        )


def test_another_field_is_read_of_jsonl_and_parquet(tmp_path, script):
    texts = [text for text in documents(300) if text]
    jsonl = write_rows(tmp_path / "a.jsonl", [{"body": text, "text": 1} for text in texts])
    parquet = write_parquet(tmp_path / "a.parquet", texts, column="body")
    for source in (jsonl, parquet):
        out = tmp_path / source.suffix
        for main, flags in both_commands(source, out):
            code, _, err = script(main, *flags, "--text_field=body")
            assert (code, err) == (0, [])
            code, _, (line,) = script(main, *flags)
            assert code == 2 and "no text in the field text; fields: " in line
        assert stored(out / "rows") == [text.replace("\0", "") for text in texts]
        assert read_manifest(out / "rows")["text_field"] == "body"


def test_what_is_left_out_before_a_stop_is_counted_too(tmp_path, script):
    rows = [{"text": f"{i} " + "words " * 20} for i in range(1500)]
    rows[200:230] = [{"body": 1}] * 30  # and one line that is broken, behind some shards
    source = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in rows]
    source.write_text("\n".join([*lines[:1200], "{", *lines[1200:]]))
    flags = [f"--source={source}", "--val_tokens=100", "--shard_tokens=10000", "--tokenizer=byte"]
    flags += [f"--out={tmp_path / 'out'}"]
    code, _, (line,) = script(prepare_fineweb.main, *flags)
    assert code == 1 and "line 1,201 is no JSON" in line
    assert read_manifest(tmp_path / "out")["shards"]
    code, out, (warning,) = script(prepare_fineweb.main, *flags, "--skip_broken")
    assert code == 0 and "warning: 30 of 1,501 rows (2.0%) hold no text" in warning
    assert "skipped: 1 of 1,501 rows (0.1%) are broken lines; the first: " in out


# -----------------------------------------------------------------------------
# Lines


def test_what_is_a_row_of_jsonl(tmp_path):
    lines = ['\ufeff{"text": "marked"}', "", '{"text": "\\ud83d alone"}', "  ", '{"text": null}']
    source = write_rows(tmp_path / "a.jsonl", [*lines, '{"text": "caf\\u00e9"}\r'])
    ((file, row, texts),) = FilesSource([str(source)])(0, 0)
    assert (file, row) == (0, 0)
    assert texts[:4] + texts[5:] == ["marked", None, "\ud83d alone", None, "caf\u00e9"]
    assert texts[4].kind == "no text"
    # from any line on
    assert next(FilesSource([str(source)])(0, 2)) == (0, 2, texts[2:])


BROKEN = {
    '{"text": "cut': "Unterminated string starting at",
    '{"text": "a"} {"text": "b"}': "Extra data",
    '[{"text": "a"}]': "a list; jq -c '.[]' FILE > NEW makes lines of it",
    '"text"': "str",
    "[" * 100_000: "a list; ",
    '{"a":' * 100_000: "recursion",
    '{"n": ' + "1" * 5000 + "}": "digits",
}


@pytest.mark.parametrize("line, reason", BROKEN.items(), ids=range(len(BROKEN)))
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_broken_line_is_named_or_skipped(tmp_path, script, line, reason, ending):
    rows = [{"text": f"row {i} " * 5} for i in range(150)]
    # the blank one is a line too
    source = write_rows(tmp_path / f"a{ending}", [*rows[:100], "", line, *rows[100:], line])
    for main, flags in both_commands(source, tmp_path / "out"):
        code, _, (error,) = script(main, *flags)
        assert code == 2 and error.startswith(f"error: {source}: line 102 is no JSON object (")
        assert reason in error and error.endswith("; fix it, or prepare with --skip_broken")
        code, out, err = script(main, *flags, "--skip_broken")
        assert (code, err) == (0, [])
        said = f"are broken lines; the first: {source}: line 102 is no JSON object ("
        assert f"\nskipped: 2 of 153 rows (1.3%) {said}" in f"\n{out}"
    assert stored(tmp_path / "out/rows") == [row["text"] for row in rows]


def test_a_file_that_needs_another_library_or_was_cut_is_one_line(tmp_path):
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    with pytest.raises(UserError, match=r"cut.jsonl.gz: EOFError: Compressed file ended before"):
        texts_of([cut])
    try:
        import zstandard  # noqa: F401
    except ImportError:
        packed = tmp_path / "a.jsonl.zst"
        packed.write_bytes(b"\x28\xb5\x2f\xfd")
        with pytest.raises(UserError, match="pip install zstandard, to read .zst files"):
            texts_of([packed])


# -----------------------------------------------------------------------------
# The same command continues

LINES = [{"text": f"document {i} " * 3} for i in range(16_000)]
FLAGS = ["--val_tokens=10k", "--shard_tokens=100k", "--tokenizer=byte"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The data folder of a source that was whole from the start."""
    folder = tmp_path_factory.mktemp("straight")
    source = write_rows(folder / "a.jsonl", LINES)
    prepare_fineweb.main([f"--source={source}", f"--out={folder / 'out'}", *FLAGS])
    return folder / "out"


def test_after_a_line_has_been_mended_the_same_command_continues(tmp_path, straight, capsys):
    broken = [*LINES[:15_000], '{"text": "document 15000', *LINES[15_001:]]
    source, out = write_rows(tmp_path / "a.jsonl", broken), tmp_path / "out"
    command = [f"--source={source}", f"--out={out}", *FLAGS]
    with pytest.raises(RunError) as raised:
        prepare_fineweb.main(command)
    (problem,) = raised.value.problems
    assert f"{source}: line 15,001 is no JSON object (" in problem
    assert "the same command continues after the last finished shard" in problem
    finished = digests(out)
    assert 3 < len(finished) < len(digests(straight))
    write_rows(source, LINES)
    prepare_fineweb.main(command)
    assert f"warning: {source}: has changed since the preparation began" in capsys.readouterr().err
    assert digests(out) == digests(straight) and finished.items() < digests(out).items()


def test_a_killed_preparation_of_jsonl_continues_with_any_number_of_threads(tmp_path, straight):
    source, out = write_rows(tmp_path / "a.jsonl", LINES), tmp_path / "out"
    slow = "import sys, time; from data import prepare_fineweb, writer\n"
    slow += "encode = writer.encode_batch\n"
    slow += "writer.encode_batch = lambda *a: time.sleep(0.01) or encode(*a)\n"
    slow += "prepare_fineweb.main(sys.argv[1:])"
    flags = ["-c", slow, f"--source={source}", f"--out={out}", *FLAGS, "--workers=3"]
    process = start_process(*flags)
    while len(list(out.glob("*.bin"))) < 2 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert 2 <= len(digests(out)) < len(digests(straight))
    prepare_fineweb.main([f"--source={source}", f"--out={out}", *FLAGS, "--workers=1"])
    assert digests(out) == digests(straight)


@pytest.mark.parametrize("failing_row", [300, 700, 999])
def test_own_text_continues_with_the_same_validation(tmp_path, failing_row):
    """Rows and files together; what validation is owed is worked out again from the beginning."""
    book = tmp_path / "book.txt"
    book.write_text("a line of it\n" * 900)
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"text": f"row {i} " * (i % 9)} for i in range(1000)]
    )
    names = [str(book), str(rows), str(write_rows(tmp_path / "more.jsonl", LINES[:500]))]

    def fill(out: Path, fails: bool) -> None:
        own = prepare_text.OwnText(FilesSource(names), 0.05)

        def source(file, row):
            for number, first, parts in own(file, row):
                if fails and (number, first + len(parts)) > (1, failing_row):
                    raise UserError("gone")
                yield number, first, parts

        plan = Plan(out, "s", names, Tokenizer({"kind": "byte"}), 0, {}, shard_tokens=3000)
        prepare(plan, source, workers=2)

    fill(tmp_path / "straight", fails=False)
    with pytest.raises(RunError, match="gone"):
        fill(tmp_path / "out", fails=True)
    begun = digests(tmp_path / "out")
    assert begun
    fill(tmp_path / "out", fails=False)
    assert digests(tmp_path / "out") == digests(tmp_path / "straight") != begun
    val = [f for f in digests(tmp_path / "straight") if f.startswith("val")]
    assert len(val) > 3  # beside each shard for training, from the beginning on


def test_jsonl_on_the_hub_is_read_as_here(tmp_path):
    """Also packed, and through a file that is read in pieces."""
    source = tmp_path / "source"
    source.mkdir()
    write_rows(source / "a.jsonl", LINES[:9000])
    write_rows(source / "b.jsonl.gz", LINES[9000:])
    prepare_fineweb.main([f"--source={source}", f"--out={tmp_path / 'here'}", *FLAGS])
    command = ["data/prepare_fineweb.py", "--dataset=org/name", "--name=small", *FLAGS]
    with serve_hub(source) as address:
        hub = dict(HF_ENDPOINT=address, HF_HOME=str(tmp_path))
        code, _, err = run_process(*command, f"--out={tmp_path / 'hub'}", **hub)
    assert (code, err) == (0, "")
    assert digests(tmp_path / "hub") == digests(tmp_path / "here")


def test_readers_begin_at_any_row(tmp_path):
    texts = [f"row {i}" for i in range(333)]
    for path in (
        write_parquet(tmp_path / "a.parquet", texts),
        write_rows(tmp_path / "a.jsonl.gz", [{"text": text} for text in texts]),
    ):
        for row in (0, 1, 63, 64, 100, 199, 332, 333):
            found = list(FilesSource([str(path)])(0, row))
            assert [text for _, _, rows in found for text in rows] == texts[row:]
            assert all(rows[0] == f"row {first}" for _, first, rows in found)


def test_files_that_are_not_read_are_said_and_ndjson_is_read(tmp_path, script):
    folder = tmp_path / "source"
    folder.mkdir()
    write_rows(folder / "a.ndjson", [{"text": f"row {i} " * 20} for i in range(200)])
    for name in ("b.json.bak", "c.pdf", "d.pdf"):
        (folder / name).write_text("{}")
    for main, flags in both_commands(folder, tmp_path / "out"):
        code, _, err = script(main, *flags)
        said = f"warning: 3 files are not read (.bak, .pdf), such as {folder}/"
        assert code == 0 and len(err) == 1 and err[0].startswith(said)


def test_the_end_of_the_tokens_is_said_where_the_source_has_more(tmp_path, script):
    (tmp_path / "source").mkdir()
    for name in "abc":
        rows = [{"text": f"{name} {i} " + "words " * 20} for i in range(100)]
        write_rows(tmp_path / "source" / f"{name}.jsonl", rows)
    flags = [f"--source={tmp_path / 'source'}", "--val_tokens=100", "--tokenizer=byte"]
    flags += ["--tokens=15000", f"--out={tmp_path / 'out'}"]
    code, out, _ = script(prepare_fineweb.main, *flags)
    said = "--tokens=15,000 ends in file 2 of 3; the rest of the source is not read"
    assert code == 0 and said in out


def test_lines_of_another_encoding_are_broken_unless_it_is_given(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_bytes('{"text": "caf\u00e9"}\n'.encode("cp1252"))
    with pytest.raises(UserError, match="line 1 is no JSON object .not UTF-8; iconv -f NAME"):
        texts_of([source])
    assert texts_of([source], encoding="cp1252") == ["caf\u00e9"]
    source.write_bytes(b'{"text": "\x81"}\n')  # no letter of cp1252
    with pytest.raises(UserError, match="line 1 is no JSON object .*0x81"):
        texts_of([source], encoding="cp1252")
    source.write_bytes('{"text": "caf\u00e9"}\n'.encode("utf-16"))
    with pytest.raises(UserError, match="not UTF-8"):
        texts_of([source])


def test_the_programs_own_folder_is_not_filled(tmp_path, script):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "words " * 2000}])
    code, _, (error,) = script(prepare_text.main, str(source), "--out=data")
    assert code == 2 and error.endswith("holds this program's own files; choose a folder in it")
