"""
Preparation: the right tokens in the right shards, whatever interrupts it, and one line for whatever
is wrong with it.
"""

import hashlib
import json
import os
import random
import signal
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
from documents import (
    REVISION,
    Hub,
    check_documents,
    documents,
    serve_hub,
    write_jsonl,
    write_parquet,
    write_source,
)
from helpers import (
    ON_WINDOWS,
    ROOT,
    full_disk_at,
    needs_a_full_disk,
    run_process,
    start_process,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from common.console import RunError, UserError, parse_count
from data import prepare_fineweb, prepare_text, sources, writer
from data.shards import open_dataset
from data.tokenizer import Tokenizer
from data.writer import Plan, prepare

EOT = 50256


@pytest.fixture(scope="module")
def vocabulary():
    """GPT-2's BPE, or skip: tiktoken fetches it once, or reads it from TIKTOKEN_CACHE_DIR."""
    try:
        return Tokenizer({"kind": "gpt2"})
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def bytes_for_tokens(monkeypatch):
    """prepare_fineweb with the byte tokenizer, for what does not depend on the vocabulary."""
    byte = Tokenizer({"kind": "byte"})
    monkeypatch.setattr(prepare_fineweb, "pick_tokenizer", lambda *_: byte)


def stored(folder: Path, split: str) -> np.ndarray:
    """The tokens of a split, read without any of our code: 1024 bytes of header, then uint16."""
    shards = sorted(folder.glob(f"{split}_*.bin"))
    return np.concatenate([np.fromfile(shard, dtype="<u2", offset=1024) for shard in shards])


def contents(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def fineweb(*flags: str) -> int:
    """The command, in this process: its exit code, 0 for success. Raises UserError."""
    return prepare_fineweb.main([str(flag) for flag in flags]) or 0


def from_text(*flags: str | Path) -> None:
    """prepare_text.py, in this process. Raises UserError."""
    prepare_text.main([str(flag) for flag in flags])


# -----------------------------------------------------------------------------
# The right tokens


def test_stdlib_dataset_is_small_representative_and_the_same_every_time(tmp_path):
    code, _, stderr = run_process("data/prepare_text.py", f"--out={tmp_path / 'first'}")
    assert code == 0, stderr
    from_text(f"--out={tmp_path / 'second'}", "--workers=1")
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    data = open_dataset(str(tmp_path / "first"))
    total = len(data.train) + len(data.val)
    assert 2e6 < total < 6e6 and 0.045 < len(data.val) / total < 0.055
    val = bytes(stored(tmp_path / "first", "val").tolist()).decode().split("\0")[1:]
    assert len(val) > 8  # ends of modules
    sources = [path.read_text("utf-8") for path in Path(os.__file__).parent.glob("*.py")]
    assert all(any(text.endswith(end) for text in sources) for end in val)


def validation_of(out: Path, texts: list[str]) -> list[str]:
    """Validation's documents of a byte dataset that holds each of the texts once, in order."""
    val, train = (
        bytes(stored(out, split).tolist()).decode()[1:].split("\0") for split in ("val", "train")
    )
    check_documents(val, train, texts)
    return val


def test_text_files_and_rows_become_documents_in_order(tmp_path):
    (tmp_path / "a.txt").write_bytes(("\ufeffone\r\ntwo\0" + "a" * 99).encode())
    (tmp_path / "b.md").write_text("# na\u00efve" + "b" * 400, "utf-8")
    (tmp_path / "B.TXT").write_text("capitals" + "B" * 99)
    (tmp_path / "empty.py").write_text("")
    rows = write_jsonl(tmp_path / "c.jsonl", ["three" * 40, None, "", "four" * 40])
    one_by_one = [tmp_path / name for name in ("B.TXT", "a.txt", "*.md", "empty.py")] + [rows]
    texts = ["capitals" + "B" * 99, "one\ntwo" + "a" * 99, "# na\u00efve" + "b" * 400]
    texts += ["three" * 40, "four" * 40]
    # the files as they are named, and all in the folder, sorted
    for number, files in enumerate((one_by_one, [tmp_path])):
        out = tmp_path / f"out{number}"
        from_text(*files, f"--out={out}", "--val_fraction=0.2")
        validation_of(out, texts)


def test_the_end_of_a_single_document_is_for_validation_from_a_paragraph_on(tmp_path):
    whole = "\n\n".join(f"paragraph {i} " * 5 + "\nand a line" for i in range(40))
    book, out = tmp_path / "book.txt", tmp_path / "out"
    book.write_text(whole)
    from_text(book, f"--out={out}", "--val_fraction=0.25")
    (val,) = validation_of(out, [whole])
    assert val.startswith("paragraph") and 0.25 <= len(val) / len(whole) < 0.3
    with pytest.raises(UserError, match=r"other text .*\(val_fraction\); choose another "):
        from_text(book, f"--out={out}", "--val_fraction=0.5")
    resumed = tmp_path / "resumed"
    with full_disk_at("val_000001.bin"):
        with pytest.raises(RunError, match="the same command continues"):
            from_text(book, f"--out={resumed}", "--val_fraction=0.25")
    from_text(book, f"--out={resumed}", "--val_fraction=0.25")
    assert contents(resumed) == contents(out)


def test_validation_has_each_tenth_of_the_text(tmp_path):
    """A language that is a tenth of a folder, wherever its files stand, is validated on."""
    texts = [f"{i} " * 5000 for i in range(10)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    out = tmp_path / "out"
    from_text(tmp_path / "*.txt", f"--out={out}")
    assert {int(text.split()[0]) for text in validation_of(out, texts)} == set(range(10))


def test_validation_is_from_all_over_the_text(tmp_path):
    """Six languages in path order: the first documents would be of one of them."""
    texts = [f"{letter}{i} " * (100 + 30 * i) for letter in "abcdef" for i in range(8)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_text(text)
    for out in ("first", "second"):
        from_text(tmp_path / "*.txt", f"--out={tmp_path / out}")
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    val = validation_of(tmp_path / "first", texts)
    assert {text[0] for text in val} == set("abcdef") and 12 <= len(val) <= 16
    # at most a sixteenth of it is still owed at the end
    assert 0.046 <= sum(map(len, val)) / sum(map(len, texts)) < 0.055


@given(st.lists(st.integers(0, 400), min_size=1, max_size=60), st.sampled_from([0.05, 0.2, 0.5]))
@settings(max_examples=100, deadline=None)
def test_validation_is_its_share_of_any_text_at_any_point(sizes, fraction):
    """Each document once, in two parts; and also from any place in it the same."""
    texts = ["word " * size for size in sizes]
    own = prepare_text.OwnText(lambda file, row: iter([(0, 0, texts)]), fraction)
    ((_, _, parts),) = own(0, 0)
    assert ["".join(both) for both in parts] == texts
    val, total = sum(len(end) for _, end in parts), sum(map(len, texts))
    # at most a piece is still owed at the end, or what the last document has added
    most = fraction * max(total / 16, *map(len, texts), 0)
    assert fraction * total - most - 1 <= val <= fraction * total + most / 2 + 1
    for row in range(len(texts)):
        assert list(own(0, row)) == [(0, row, parts[row:])]


def test_rows_for_validation_are_whole_and_never_trained_on(tmp_path):
    texts = [f"row {i} " * (i % 7 + 2) for i in range(1000)]
    source = write_parquet(tmp_path / "a.parquet", texts)
    from_text(source, f"--out={tmp_path / 'out'}")
    val = validation_of(tmp_path / "out", texts)
    assert set(val) < set(texts) and 30 < len(val) < 80
    numbers = [texts.index(text) for text in val]
    assert max(b - a for a, b in zip([0, *numbers], [*numbers, 1000], strict=True)) < 150


GERMAN = "\u00dcber die Gr\u00f6\u00dfe der Stra\u00dfe \u2013 5 \u20ac.\n" * 30
RUSSIAN = "\u041a\u043e\u0442 \u0436\u0434\u0430\u043b \u0443 \u0434\u0432\u0435\u0440\u0438, "
RUSSIAN = (
    f"{RUSSIAN}\u0430 \u043c\u0430\u043c\u0430 \u0443\u0436\u0435 \u0441\u043f\u0430\u043b\u0430.\n"
    * 30
)
MANY = "\u540d\u524d\u306f\u307e\u3060\u7121\u3044\u3002\n" * 40
UNREADABLE = {
    "cp1252.txt": (GERMAN.encode("cp1252"), r"line 1 is not utf-8: b'\xdcber die'; leave it"),
    "latin.md": (("x\n" * 9 + "caf\u00e9").encode("latin1"), r"line 10 is not utf-8: b'\xe9'; "),
    "damaged.txt": (
        MANY.encode() + b"\xff" + MANY.encode(),
        "line 41 is not utf-8: b'\\xff\\xe5\\x90\\x8d\\xe5\\x89\\x8d\\xe3'; leave it out, or ",
    ),
    "utf16.txt": (
        MANY.encode("utf-16-le") + b"a\0" * 9,
        "or give --encoding=NAME, such as cp1252, for all such files",
    ),
    "odd.txt": (MANY.encode("utf-16") + b"a", "line 41 is not utf-16: b'a'"),
    "twice.txt": (
        GERMAN.encode("cp1252").decode("latin1").encode(),
        "60 NULs and control characters: binary, or not utf-8; leave it out",
    ),
    "scan.txt": (b"%PDF-1.4\n" + random.Random(0).randbytes(9999), "is not utf-8: "),
}


def test_every_file_that_cannot_be_read_is_named_at_once_and_none_is_guessed(tmp_path):
    good = [("utf8.txt", "utf-8"), ("marked.txt", "utf-8-sig"), ("utf16.md", "utf-16")]
    for name, encoding in good:
        (tmp_path / name).write_bytes((GERMAN + RUSSIAN + MANY).encode(encoding))
    for name, (content, _) in UNREADABLE.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        from_text(tmp_path, f"--out={tmp_path / 'out'}")
    problems = {Path(p.partition(": ")[0]).name: p for p in raised.value.problems}
    assert raised.value.exit_code == 2 and not (tmp_path / "out").exists()
    assert sorted(problems) == sorted(UNREADABLE)
    for name, (_, message) in UNREADABLE.items():
        assert message in problems[name], problems[name]


def test_bytes_are_left_out_of_nothing_but_utf8(tmp_path):
    """The advice for a text with a broken byte is none for one that is full of NULs."""
    (tmp_path / "nuls.txt").write_bytes("\u00e4\0".encode() * 99)
    with pytest.raises(UserError, match="99 NULs and .* is not ascii: .*; leave it out, or conv"):
        from_text(tmp_path / "nuls.txt", f"--out={tmp_path / 'out'}", "--encoding=ascii")


@pytest.mark.parametrize("encoding", ["cp1252", "shift_jis", "utf-16-le", "iso2022_jp"])
def test_an_encoding_is_for_the_files_that_are_not_utf8(tmp_path, capsys, encoding):
    text = GERMAN if encoding == "cp1252" else MANY
    (tmp_path / "own.txt").write_bytes(text.encode(encoding))
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbf" + GERMAN.encode())
    (tmp_path / "b.md").write_bytes(GERMAN.replace("\n", "\r\n").encode("utf-16"))
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / "c.md").write_text("")
    from_text(tmp_path, f"--out={tmp_path / 'out'}", f"--encoding={encoding}")
    validation_of(tmp_path / "out", [GERMAN, GERMAN, text])
    # a wrong --encoding that fits is seen by what it makes of the text
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"files read as {encoding}, 1 in all, such as:"
    assert said[1].startswith(f"{tmp_path / 'own.txt'}: '{text[:4]}")
    assert said[2].startswith(f"{tmp_path / 'out'}: ")
    # neither noise nor UTF-8 with a broken byte becomes text by it
    for other in ("scan.txt", "damaged.txt"):
        (tmp_path / other).write_bytes(UNREADABLE[other][0])
    with pytest.raises(UserError) as raised:
        from_text(tmp_path, f"--out={tmp_path / 'other'}", f"--encoding={encoding}")
    assert len(raised.value.problems) == 2


def test_a_text_smaller_than_a_window_is_one_line(tmp_path, monkeypatch):
    assert (
        f"block_size = {prepare_text.LEAST_TOKENS - 1} "
        in (ROOT / "config/quickstart.py").read_text()
    )
    monkeypatch.chdir(tmp_path)
    for size, fraction, message in (
        (50, 0.05, "each needs at least 65; give more text, about 1,300 tokens in all"),
        (
            300,
            0.05,
            "300.txt: 16 tokens for validation and 286 for training, each needs at least 65",
        ),
        (100, 0.5, "give more text, about 200 tokens in all"),
    ):
        Path(f"{size}.txt").write_text("x" * size)
        with pytest.raises(UserError, match=message) as raised:
            from_text(f"{size}.txt", f"--val_fraction={fraction}")
        assert len(raised.value.problems) == 1 and raised.value.exit_code == 2
        assert not list(Path("data").glob("*/*.*"))
    Path("line.txt").write_text("one line, " * 300)  # is cut between two words
    from_text("line.txt")
    assert validation_of(Path("data/line"), ["one line, " * 300])[0].startswith(("one", "line"))


@pytest.mark.parametrize(
    "flags, message",
    [
        (["c.docx"], "c.docx: save it as text first; read are .txt, "),
        (["nowhere.txt"], "nowhere.txt: no such file"),
        (["a.txt", "--val_fraction=5"], "--val_fraction: 5.0 is not between 0 and 0.5"),
        (["b.txt", "--encoding=cp-1252"], "line 1 is not utf-8: .*; line 1 is not cp-1252: "),
    ],
)
def test_text_that_cannot_be_used(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("long enough " * 99)
    Path("b.txt").write_bytes(b"caf\xe9")
    Path("c.docx").write_text("")
    with pytest.raises(UserError, match=message) as raised:
        from_text(*flags, "--out=out")
    assert raised.value.exit_code == 2 and not Path("out").exists()


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_fineweb_shards_hold_every_document_once_in_order(vocabulary, tmp_path, form):
    texts = documents(700) + ["<|endoftext|> in a text is text"]
    write = write_parquet if form == "parquet" else write_jsonl
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / f"a.{form}", texts[:450])
    write(tmp_path / "source" / f"b.{form}", texts[450:])
    out = tmp_path / "out"
    flags = [f"--out={out}", "--val_tokens=1k", "--shard_tokens=3k"]
    assert fineweb(f"--source={tmp_path / 'source'}", *flags) == 0
    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    expected = [[EOT, *encode(text)] for text in texts if text]
    sums = list(accumulate(map(len, expected)))
    split = next(i for i, tokens in enumerate(sums) if tokens >= 1000) + 1
    assert stored(out, "val").tolist() == sum(expected[:split], [])
    assert stored(out, "train").tolist() == sum(expected[split:], [])
    manifest = json.loads((out / "manifest.json").read_text())
    shards = manifest["shards"]
    assert sum(shard["documents"] for shard in shards) == len(expected)
    # each ends with the document that fills it
    ends = [shard["tokens"] for shard in shards[1:-1]]
    assert all(3000 <= tokens < 3000 + max(map(len, expected)) for tokens in ends)
    for shard in shards:
        content = (out / shard["name"]).read_bytes()
        assert np.frombuffer(content[:12], "<i4").tolist() == [20240520, 1, shard["tokens"]]
        assert hashlib.sha256(content).hexdigest() == shard["sha256"]
        assert np.frombuffer(content[1024:], "<u2")[0] == EOT


SAMPLE = ROOT.parent / "shared" / "corpora" / "fineweb_sample.parquet"


@pytest.mark.skipif(not SAMPLE.exists(), reason="the FineWeb sample is not beside this checkout")
def test_real_fineweb_documents(vocabulary, tmp_path):
    flags = [f"--out={tmp_path / 'out'}", "--val_tokens=20k", "--shard_tokens=100k"]
    assert fineweb(f"--source={SAMPLE}", *flags) == 0
    counts = 346_497, 387  # GPT-2 tokens and documents, as counted by those who made the file
    assert sum(len(stored(tmp_path / "out", split)) for split in ("train", "val")) == sum(counts)
    shards = json.loads((tmp_path / "out" / "manifest.json").read_text())["shards"]
    assert sum(shard["documents"] for shard in shards) == counts[1]


def test_the_document_that_reaches_the_tokens_asked_for_is_the_last(
    bytes_for_tokens, tmp_path, capsys
):
    source = write_parquet(tmp_path / "a.parquet", documents(300))
    flags = [f"--source={source}", "--val_tokens=500", "--shard_tokens=2k"]
    fineweb(*flags, f"--out={tmp_path / 'out'}", "--tokens=5k")
    train = stored(tmp_path / "out", "train")
    # no document of bytes holds a 0
    assert len(train) >= 5000 > np.flatnonzero(train == 0)[-1]
    assert "the source has no more" not in capsys.readouterr().out
    fineweb(*flags, f"--out={tmp_path / 'all'}", "--tokens=1M")
    assert "the source has no more: 1,000,000 tokens were asked for\n" in capsys.readouterr().out


def test_invalid_utf8_in_parquet_becomes_the_replacement_character(bytes_for_tokens, tmp_path):
    broken = pa.array([b"caf\xe9 \xff", b"fine"] * 50, pa.binary())
    text = pa.StringArray.from_buffers(len(broken), *broken.buffers()[1:])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    out = tmp_path / "out"
    assert fineweb(f"--source={tmp_path / 'a.parquet'}", f"--out={out}", "--val_tokens=10") == 0
    assert "caf\ufffd \ufffd\0fine" in bytes(stored(out, "train").tolist()).decode()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_interruption_leaves_the_same_shards(tmp_path_factory, data):
    """
    Shards against a few lines of list arithmetic, with the source failing at random documents on
    the way.
    """
    texts = data.draw(
        st.lists(st.sampled_from([None, "", "a", "bc", "d" * 9, "e" * 40]), min_size=2, max_size=30)
    )
    val_tokens, shard_tokens = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 50))
    train_tokens = data.draw(st.none() | st.integers(1, 200))
    failures = data.draw(st.lists(st.integers(0, len(texts)), max_size=3))
    out = tmp_path_factory.mktemp("out")
    byte = Tokenizer({"kind": "byte"})
    plan = Plan(out, "s", [], byte, 0, {}, "r", val_tokens, train_tokens, shard_tokens)
    val, train, rest = [], [], [[0, *text.encode()] for text in texts if text]
    while rest and len(val) < val_tokens:
        val += rest.pop(0)
    while rest and len(train) < (train_tokens or 10**9):
        train += rest.pop(0)

    def source(file, row):
        for number in range(row, len(texts)):
            if failures and number >= failures[0]:
                failures.pop(0)
                raise UserError("gone")
            yield 0, number, texts[number : number + 1]

    for _ in range(len(failures) + 1):
        try:
            # fsync would be most of the time; read ahead, a failure would come before the first
            # document is written
            with mock.patch("os.fsync"), mock.patch("data.writer.READ_AHEAD", 0):
                prepare(plan, source, workers=1)
        except UserError as error:
            if "gone" not in str(error):  # no tokens are left for training
                assert not train and not out.exists()
                return
    assert stored(out, "val").tolist() == val and stored(out, "train").tolist() == train
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["complete"] and "next" not in manifest
    assert all(shard["tokens"] < shard_tokens + 41 for shard in manifest["shards"])


# -----------------------------------------------------------------------------
# Interruptions

# prepare_fineweb with bytes for tokens, which needs no vocabulary, and so slow that a signal meets
# it at work
SLOW = """
import sys, time
from common.console import run_main
from data import prepare_fineweb, sources, writer
def slow(*arguments, encode_batch=writer.encode_batch):
    time.sleep(0.003)
    return encode_batch(*arguments)
sources.ROWS_PER_READ = 5
writer.encode_batch = slow
run_main(prepare_fineweb.main)
"""


def slow_fineweb(source: Path, out: Path, workers: int):
    flags = ["--tokens=1M", "--val_tokens=10k", "--shard_tokens=20k", f"--workers={workers}"]
    flags.append("--tokenizer=byte")
    return start_process("-c", SLOW, f"--source={source}", f"--out={out}", *flags)


def wait_for_shards(out: Path, count: int, process) -> None:
    while len(list(out.glob("*.bin"))) < count and process.poll() is None:
        time.sleep(0.002)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def straight(source, tmp_path_factory) -> Path:
    """The data folder of a preparation that nothing interrupts."""
    out = tmp_path_factory.mktemp("straight") / "out"
    process = slow_fineweb(source, out, workers=2)
    assert process.wait(60) == 0, process.stderr.read()
    return out


def test_stopped_anywhere_the_same_command_ends_with_the_same_bytes(source, straight, tmp_path):
    rng, out = random.Random(5), tmp_path / "out"
    stops = [(1, "kill"), (8, "kill" if ON_WINDOWS else "Ctrl-C"), (15, "kill"), (1000, None)]
    for attempt, (shards, stop) in enumerate(stops):
        process = slow_fineweb(source, out, workers=1 + attempt % 2)
        wait_for_shards(out, shards, process)
        if stop:
            # in the middle of a shard, of writing one, or of writing the manifest
            time.sleep(rng.random() / 50)
            process.kill() if stop == "kill" else process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=60)[1]
        codes = {"kill": [-9, 1], "Ctrl-C": [130], None: [0]}
        assert process.returncode in codes[stop] and "error" not in stderr, stderr
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["complete"] == (stop is None)
        if stop == "Ctrl-C":
            assert stderr == "stopped: the same command continues after the last finished shard\n"
            assert not list(out.glob("*.tmp"))
            # more tokens later would be another dataset to resume on
            with pytest.raises(UserError, match="unfinished"):
                open_dataset(str(out))
    assert contents(out) == contents(straight)


def test_two_preparations_in_one_folder_do_not_touch_each_other(source, straight, tmp_path):
    out = tmp_path / "out"
    first = slow_fineweb(source, out, workers=1)
    wait_for_shards(out, 2, first)
    psutil.Process(first.pid).suspend()  # in the middle, for as long as the second takes
    second = slow_fineweb(source, out, workers=1)
    message = f"error: {out}: another preparation is writing to it; wait for that one, or"
    message += " choose another folder\n"
    assert second.communicate(timeout=60)[1] == message and second.returncode == 2
    psutil.Process(first.pid).resume()
    assert first.wait(60) == 0 and contents(out) == contents(straight)


@needs_a_full_disk
def test_a_full_disk_ends_in_one_line_and_leaves_no_half_file(
    bytes_for_tokens, tmp_path, monkeypatch
):
    source = write_parquet(tmp_path / "a.parquet", documents(400))
    flags = [f"--source={source}", "--val_tokens=1k", "--shard_tokens=3k"]
    out = tmp_path / "out"
    original = writer.write_shard

    def full(path, tokens):
        if path.name == "train_000002.bin":
            path.with_name(f"{path.name}.{os.getpid()}.tmp").symlink_to("/dev/full")
        return original(path, tokens)

    monkeypatch.setattr(writer, "write_shard", full)
    message = f"{out}: No space left on device; .*the same command continues"
    with pytest.raises(RunError, match=message):
        fineweb(*flags, f"--out={out}")
    monkeypatch.setattr(writer, "write_shard", original)
    assert sorted(contents(out)) == ["lock", "manifest.json", "train_000001.bin", "val_000000.bin"]
    assert fineweb(*flags, f"--out={out}") == 0
    assert fineweb(*flags, f"--out={tmp_path / 'straight'}") == 0
    assert contents(out) == contents(tmp_path / "straight")


@pytest.mark.skipif(ON_WINDOWS, reason="Windows' folders have no such mode")
def test_a_read_only_folder_is_one_line():
    script = """
import os, sys
from data import prepare_fineweb, sources
from common.console import run_main
if os.getuid() == 0:  # to root every folder can be written
    # imports what only root may read
    list(sources.FilesSource([sys.argv[1].partition("=")[2]])(0, 0))
    os.setuid(65534)
run_main(prepare_fineweb.main)
"""
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which is root's alone
        write_parquet(Path(folder, "a.parquet"), documents(40))
        os.chmod(folder, 0o555)
        options = [f"--source={folder}/a.parquet", f"--out={folder}/out", "--val_tokens=10"]
        options.append("--tokenizer=byte")
        code, _, stderr = run_process("-c", script, *options)
        assert (code, stderr) == (2, f"error: {folder}/out: Permission denied\n")
        os.chmod(folder, 0o755)


# -----------------------------------------------------------------------------
# The hub


@pytest.fixture
def hub(source):
    with serve_hub(source) as address:
        yield address


def from_hub(address: str, out: Path, home: Path, backoff: str = "()") -> tuple[int, str]:
    """Without symbolic links, as on Windows: the hub's library would warn of that at length."""
    script = SLOW.replace("run_main(", f"sources.BACKOFF_SECONDS = {backoff}\nrun_main(")
    script = f"import os\ndef refuse(*_, **__): raise OSError(22)\nos.symlink = refuse{script}"
    flags = ["--dataset=org/name", "--name=small", "--tokenizer=byte", "--tokens=1M"]
    flags += ["--val_tokens=10k", "--shard_tokens=20k"]
    hub = dict(HF_ENDPOINT=address, HF_HOME=str(home))
    code, _, stderr = run_process("-c", script, *flags, f"--out={out}", **hub)
    return code, stderr


def test_the_hub_and_local_files_give_the_same_shards_and_a_failing_hub_is_asked_again(
    hub, straight, tmp_path
):
    Hub.downloads_allowed = 5  # not enough for the second file
    code, stderr = from_hub(hub, tmp_path / "out", tmp_path, backoff="(0.01,)")
    assert code == 1, stderr
    assert 1 < len(list((tmp_path / "out").glob("*.bin"))) < len(list(straight.glob("*.bin")))
    warning, error = stderr.splitlines()
    assert "again in 0.01 s" in warning and error.startswith("error: hf://datasets/org/name@")
    assert error.endswith(
        "the same command continues after the last finished shard, from the same source"
    )
    Hub.downloads_allowed, Hub.newest = 10**9, "b" * 40  # meanwhile there is a newer revision
    assert from_hub(hub, tmp_path / "out", tmp_path) == (0, "")
    shards = contents(tmp_path / "out")
    del shards["manifest.json"]
    assert shards.items() < contents(straight).items()
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["revision"] == REVISION


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_file_that_fails_midway_is_read_on_at_the_same_row(tmp_path, monkeypatch, form):
    texts = [str(i) for i in range(700)]
    path = (write_parquet if form == "parquet" else write_jsonl)(tmp_path / f"a.{form}", texts)
    read, good_reads = sources.READERS[f".{form}"], [1, 0, 3, 100]

    def failing(*arguments):
        left = good_reads.pop(0)
        for piece in read(*arguments):
            if not left:
                raise ConnectionError("reset by peer")
            yield piece
            left -= 1

    monkeypatch.setitem(sources.READERS, f".{form}", failing)
    monkeypatch.setattr(sources, "BACKOFF_SECONDS", (0, 0))
    batches = list(sources.FilesSource([path.as_uri()])(0, 37))
    assert [text for _, _, rows in batches for text in rows] == texts[37:]
    assert all(rows[0] == str(first) for _, first, rows in batches) and not good_reads


def test_without_a_network_one_line_names_the_way_out(tmp_path):
    code, stderr = from_hub("http://127.0.0.1:9", tmp_path / "out", tmp_path)
    assert code == 2 and stderr.count("\n") == 1 and "give local files" in stderr
    assert not (tmp_path / "out").exists()


# -----------------------------------------------------------------------------
# Bad input: an exit code, one line, and nothing left behind


def bad_file(folder: Path, name: str) -> Path:
    path = folder / name
    if name == "other_column.parquet":
        write_parquet(path, ["a"], column="body")
    elif name == "numbers.parquet":
        write_parquet(path, [1, 2])
    elif name == "nothing.parquet":
        write_parquet(path, [None, ""])
    elif name == "no_rows.parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    elif name == "other_key.jsonl":
        path.write_text('{"body": "a"}\n')
    elif name == "broken.jsonl":
        path.write_text('{"text": "a"}\n{"text": "b\n')
    elif name == "small.parquet":
        write_parquet(path, ["a few words"] * 20)
    else:
        path.write_bytes(b"" if name.startswith("empty") else bytes(range(100, 250)))
    return path


@pytest.mark.parametrize(
    "name, code, message",
    [
        (
            "other_column.parquet",
            2,
            "no text in the field text; fields: id, body; ",
        ),
        ("other_key.jsonl", 2, "fields: body; prepare with --text_field=NAME"),
        ("numbers.parquet", 2, "fields: id, text; prepare with --text_field=NAME"),
        ("no_rows.parquet", 2, "0 tokens for validation and 0 for training"),
        ("nothing.parquet", 2, "2 of 2 rows (100.0%) hold no text"),
        (
            "broken.jsonl",
            2,
            "line 2 is no JSON object (Unterminated string starting at); fix it, or",
        ),
        ("garbage.parquet", 2, "not a parquet file"),
        ("empty.parquet", 2, "Parquet file size is 0 bytes"),
        ("notes.docx", 2, "notes.docx: save it as text first; read are .parquet, "),
        (
            "small.parquet",
            2,
            "and 0 for training, each needs at least 1; give more text, or a lower --val_tokens",
        ),
    ],
)
def test_a_source_that_cannot_be_used(bytes_for_tokens, tmp_path, name, code, message):
    with pytest.raises(UserError) as raised:
        fineweb(f"--source={bad_file(tmp_path, name)}", f"--out={tmp_path / 'out'}")
    (problem,) = raised.value.problems
    assert raised.value.exit_code == code and message in problem and name in problem
    assert not list(tmp_path.glob("out/*.*"))


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--tokens=ten", "--tokens: needs a whole number above 0, such as 8 or 10M, got 'ten'"),
        ("--tokens=0", "got '0'"),
        ("--workers=0", "--workers: needs a whole number above 0, such as 8 or 10M, got '0'"),
        ("--shardtokens=3", "unrecognized arguments: --shardtokens=3"),
        ("--source=nowhere/*.parquet", "nowhere/*.parquet: no such file"),
        ("--tokens=1e15", "needs 2,000,000.05 GB of disk"),
    ],
)
def test_a_command_that_cannot_work(bytes_for_tokens, tmp_path, monkeypatch, flag, message):
    monkeypatch.chdir(tmp_path)
    write_parquet(Path("a.parquet"), documents(20))
    with pytest.raises(UserError) as raised:
        fineweb("--source=a.parquet", "--out=out", "--val_tokens=10", flag)
    (problem,) = raised.value.problems
    assert raised.value.exit_code == 2 and message in problem and not Path("out").exists()


def test_numbers_of_tokens():
    texts = {"1B": 10**9, "10M": 10**7, "1.5k": 1500, "8.2M": 8_200_000, "1e9": 10**9}
    assert {text: parse_count(text) for text in texts} == texts
    assert parse_count("1_000") == 1000


def test_errors_are_lines_and_not_tracebacks(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"caf\xe9")
    options = [str(tmp_path), f"--out={tmp_path / 'out'}"]
    code, stdout, stderr = run_process("data/prepare_text.py", *options)
    assert code == 2 and stdout == ""
    problem = r"line 1 is not utf-8: b'\xe9'; leave it out, or convert it: iconv -f NAME -t utf-8"
    problem += " FILE > NEW (-c drops bad bytes), or give --encoding=NAME, such as cp1252, for all"
    problem += " such files"
    assert stderr.splitlines() == [f"error: {tmp_path}/{n}.txt: {problem}" for n in "ab"]
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_data_is_left_alone(bytes_for_tokens, tmp_path):
    source, out = write_parquet(tmp_path / "a.parquet", documents(50)), tmp_path / "out"
    flags = [f"--source={source}", f"--out={out}", "--val_tokens=100"]
    fineweb(*flags)
    before = contents(out)
    assert fineweb(*flags) == 0  # nothing to do
    with pytest.raises(UserError, match=r"\(shard_tokens\); choose another folder, or delete"):
        fineweb(*flags, "--shard_tokens=1k")
    write_parquet(source, documents(60))
    with pytest.raises(UserError, match=r"\(.*a.parquet has changed\); choose another folder"):
        fineweb(*flags)
    (out / "manifest.json").unlink()
    with pytest.raises(UserError, match="holds files of another program"):
        fineweb(*flags)
    assert contents(out).items() < before.items()


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs Linux's /proc for the peak of memory"
)
def test_a_document_of_50_megabytes(vocabulary, tmp_path):
    """Beside ordinary ones, through the whole command, within a gigabyte of memory."""
    sentence = "the quick brown fox jumps over the lazy dog, "
    texts = ["before", sentence * (50_000_000 // len(sentence)), "after"]
    source = write_parquet(tmp_path / "a.parquet", texts)
    script = (
        "import re, sys\nfrom data.prepare_fineweb import main\nmain(sys.argv[1:])\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    options = [f"--source={source}", f"--out={tmp_path / 'out'}", "--val_tokens=1"]
    # cold: torch, which a warm process holds, would count as memory
    code, stdout, stderr = run_process("-c", script, *options, cold=True)
    assert code == 0, stderr
    tokens = [len(vocabulary.encode(text)) for text in (texts[0], sentence * 2, sentence, texts[2])]
    # each repetition but the first begins with the space before it
    per_sentence = tokens[1] - tokens[2]
    expected = tokens[2] + per_sentence * (50_000_000 // len(sentence) - 1) + tokens[3] + 2
    assert len(stored(tmp_path / "out", "train")) == expected
    # not ru_maxrss, which begins with what the parent had in use
    peak_bytes = int(stdout.split()[-1]) * 1024
    assert peak_bytes < 1e9


# -----------------------------------------------------------------------------
# What is printed


@pytest.mark.parametrize(
    "small, config", [(10**6, "config/quickstart.py"), (100, "config/gpt124m_4070.py")]
)
def test_the_next_command_is_printed(tmp_path, monkeypatch, capsys, small, config):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writer, "SMALL_DATASET", small)
    Path("notes.txt").write_text("a line\n" * 200)
    assert prepare_text.main(["notes.txt"]) is None
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last
        == f"next: python train.py {config} --dataset=notes --out_dir=out/{Path(config).stem}_notes"
    )


@needs_a_full_disk
def test_a_full_console_costs_its_lines_and_not_the_dataset(tmp_path):
    """Such as a log file on a full disk: the data are complete, so the exit code is 0."""
    (tmp_path / "a.txt").write_text("a line\n" * 200)
    code = (
        "import sys; sys.stdout = open('/dev/full', 'w'); from data import prepare_text\n"
        "from common import console\nconsole.run_main(prepare_text.main)"
    )
    flags = [str(tmp_path / "a.txt"), f"--out={tmp_path / 'out'}"]
    assert run_process("-c", code, *flags)[::2] == (0, "")
    assert len(stored(tmp_path / "out", "train")) > 0


def test_continuing_from_files_that_have_changed_or_are_missing(bytes_for_tokens, tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "out"
    write_parquet(source / "a.parquet", documents(200))
    write_parquet(source / "b.parquet", documents(200, seed=1))
    flags = [f"--source={source}", f"--out={out}", "--val_tokens=100", "--shard_tokens=3k"]
    with full_disk_at("train_000002.bin"), pytest.raises(RunError):
        fineweb(*flags)
    (source / "b.parquet").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"\(.*b.parquet is new or missing\)"):
        fineweb(*flags)
    write_parquet(source / "b.parquet", documents(300, seed=1))
    capsys.readouterr()
    assert fineweb(*flags) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and "b.parquet: has changed since" in line
    held = b"\0".join(bytes(stored(out, split).tolist()) for split in ("val", "train"))
    texts = documents(200) + documents(300, seed=1)
    assert held.count(b"\0") - 1 == len([text for text in texts if text])


def test_a_folder_that_an_earlier_version_made_is_left_alone(bytes_for_tokens, tmp_path):
    """It was perhaps left within a document; its manifest does not list the source's files."""
    source, out = write_parquet(tmp_path / "a.parquet", documents(100)), tmp_path / "out"
    flags = [f"--source={source}", f"--out={out}", "--val_tokens=100"]
    fineweb(*flags)
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["files"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    before = contents(out)
    with pytest.raises(UserError, match="an earlier version .* made it.*or delete that one"):
        fineweb(*flags)
    assert contents(out) == before and len(open_dataset(str(out)).train) > 0
