"""
Prepare data by the commands: the right tokens in the right shards, the same bytes after
interruptions, and one line for each problem. test_text.py tests what is read from which file,
and test_bad_input.py tests bad command lines.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import time
from itertools import accumulate
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import slow
from documents import (
    REVISION,
    Hub,
    chained_sha256,
    digests,
    documents,
    manifest_of,
    serve_hub,
    stored,
    stored_texts,
    write_jsonl,
    write_parquet,
)
from program import ROOT, Result, finish, needs_signals, refused, run, start, wait_for_line

from common.console import UserError
from data import prepare_fineweb, writer

FINEWEB = "data/prepare_fineweb.py"
EOT = 50256
TEXTS = [text for text in documents(700) if text]
FLAGS = ["--tokenizer=byte", "--val_tokens=2k", "--shard_tokens=3k"]


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(*arguments, script: str = FINEWEB) -> Result:
    """Prepare in this process, and check for exit code 0 and nothing on stderr."""
    result = run(script, *arguments)
    assert (result.code, result.err) == (0, ""), result
    return result


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a data folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -----------------------------------------------------------------------------
# The right tokens


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_shards_hold_every_document_once_in_order(gpt2_bpe, tmp_path, form):
    """Store the tokens that tiktoken computes, with an end-of-text before each document."""
    texts = documents(700) + ["<|endoftext|> in a text is text"]
    write = write_parquet if form == "parquet" else write_jsonl
    write(tmp_path / "source" / f"a.{form}", texts[:450])
    write(tmp_path / "source" / f"b.{form}", texts[450:])
    out = tmp_path / "out"
    sizes = ["--val_tokens=1k", "--shard_tokens=3k", "--order=prefix"]
    result = run(FINEWEB, "--source=source", f"--out={out}", *sizes)
    assert result.code == 0
    assert "3 of 701 rows hold no text" in result.err
    whole = [text for text in texts if text]
    expected = [[EOT, *gpt2_bpe.encode_ordinary(text)] for text in whole]
    sums = list(accumulate(map(len, expected)))
    held_out = next(i for i, tokens in enumerate(sums) if tokens >= 1000) + 1
    assert stored(out, "val") == sum(expected[:held_out], [])
    assert stored(out, "train") == sum(expected[held_out:], [])
    manifest = manifest_of(out)
    shards = manifest["shards"]
    assert manifest["val_text_sha256"] == chained_sha256(whole[:held_out])
    assert sum(shard["documents"] for shard in shards) == len(whole)
    assert sum(shard["bytes"] for shard in shards) == sum(len(text.encode()) for text in whole)
    for shard in shards:
        content = (out / shard["name"]).read_bytes()
        assert np.frombuffer(content[:12], "<i4").tolist() == [20240520, 1, shard["tokens"]]
        assert hashlib.sha256(content).hexdigest() == shard["sha256"]
        assert np.frombuffer(content[1024:], "<u2")[0] == EOT


@pytest.mark.parametrize(
    "val_tokens, shard_tokens, tokens",
    [(1, 1, None), (5, 100, None), (60, 7, None), (60, 1000, 200), (10, 33, 1), (25, 25, 10**6)],
)
def test_order_prefix_ends_a_split_or_shard_with_the_document_that_reaches_its_size(
    val_tokens, shard_tokens, tokens
):
    """Five tokens for validation are two whole documents."""
    texts = ["a", "bc", "d" * 9, "e" * 40, "f", "g" * 9, "h" * 40, "ij"] * 6
    write_jsonl(Path("a.jsonl"), texts)
    flags = ["--source=a.jsonl", "--order=prefix", "--tokenizer=byte", "--out=out"]
    flags += [f"--val_tokens={val_tokens}", f"--shard_tokens={shard_tokens}"]
    said = prepare(*flags, *([f"--tokens={tokens}"] if tokens else [])).out
    rest = [[0, *text.encode()] for text in texts]
    expected: dict[str, list[list[int]]] = dict(val=[], train=[])
    for split, most in (("val", val_tokens), ("train", tokens or 10**9)):
        while rest and sum(map(len, expected[split])) < most:
            shard = []
            while rest and len(shard) < min(shard_tokens, most - sum(map(len, expected[split]))):
                shard += rest.pop(0)
            expected[split].append(shard)
    for split in ("val", "train"):
        shards = sorted(Path("out").glob(f"{split}_*.bin"))
        held = [np.fromfile(shard, dtype="<u2", offset=1024).tolist() for shard in shards]
        assert held == expected[split]
    assert ("the source has no more" in said) == (tokens == 10**6)


# The shards that these files and flags have always made. A checkpoint knows its dataset by the
# shards' names and sha256, so a run resumes on a folder that is prepared again.
SHARDS = {
    "rows.parquet --val_tokens=2k --shard_tokens=5k --tokens=12k": "fd30bf40a054b2cb",
    "rows.jsonl --val_tokens=2k --shard_tokens=5k": "4b0beba292ad9f7d",
    "book.txt rows.jsonl --val_fraction=0.2": "b56ac487b2f85ef9",
}


def command(line: str, out: Path) -> list:
    """
    Return the script and arguments that prepare the files named in `line`, with its flags; tokens
    are bytes unless these say otherwise.
    """
    names = [word for word in line.split() if not word.startswith("--")]
    flags = [word for word in line.split() if word.startswith("--")]
    common = ["--tokenizer=byte", *flags, f"--out={out}"]
    if not names[0].startswith(("rows", "many")):
        return ["data/prepare_text.py", *names, *common]
    order = [] if "--order" in line else ["--order=prefix"]
    return [FINEWEB, f"--source={names[0]}", *order, *common]


def write_sources(folder: Path) -> None:
    write_parquet(folder / "rows.parquet", TEXTS[:250])
    write_jsonl(folder / "rows.jsonl", TEXTS[:250])
    table = pa.table({"text": TEXTS})
    pq.write_table(table, folder / "many.parquet", row_group_size=2)  # 350 row groups
    (folder / "book.txt").write_text("\n\n".join(TEXTS[250:400]), "utf-8")


@pytest.mark.parametrize("line", SHARDS)
def test_a_command_makes_the_same_shards_as_in_earlier_versions(line, tmp_path):
    write_sources(tmp_path)
    script, *arguments = command(line, tmp_path / "out")
    prepare(*arguments, script=script)
    made = json.dumps(digests(tmp_path / "out"), sort_keys=True)
    assert hashlib.sha256(made.encode()).hexdigest()[:16] == SHARDS[line]
    val = stored_texts(Path("out"), "val")
    assert manifest_of(Path("out"))["val_text_sha256"] == chained_sha256(val)


# -----------------------------------------------------------------------------
# Orders


@pytest.mark.parametrize(
    "name", [pytest.param("many.parquet", marks=pytest.mark.slow), "rows.jsonl"]
)
def test_validation_does_not_depend_on_the_seed_or_number_of_training_tokens(name):
    """
    Hold out row groups at equal distances, or documents of a jsonl file by a hash of their
    position.
    """
    source = [f"{n} {text}" for n, text in enumerate(TEXTS * 2)]
    pq.write_table(pa.table({"text": source}), "many.parquet", row_group_size=2)
    write_jsonl(Path("rows.jsonl"), source)
    folders = Path("few"), Path("all"), Path("straight")
    for out, more in zip(folders, (["--tokens=4k"], ["--seed=1"], []), strict=True):
        prepare(f"--source={name}", *FLAGS, *more, f"--out={out}")
    val = stored_texts(Path("all"), "val")
    train = stored_texts(Path("all"), "train")
    other = stored_texts(Path("straight"), "train")
    assert {manifest_of(out)["val_text_sha256"] for out in folders} == {chained_sha256(val)}
    few, most, straight = (
        {name: sha for name, sha in digests(out).items() if name.startswith("val")}
        for out in folders
    )
    assert few == most == straight != {}
    # no document is trained on twice or validated on; both splits have text from each half
    assert sorted(train) == sorted(other) and train != other
    assert not set(val) & set(train) and set(val) | set(train) <= set(source)
    place = {text: n for n, text in enumerate(source)}
    places = [place[text] for text in val]
    assert places == sorted(places)
    assert 0.25 < sum(n < len(source) / 2 for n in places) / len(places) < 0.75
    first = [place[text] for text in stored_texts(Path("few"), "train")]
    assert max(first) > 0.75 * len(source) and min(first) < 0.25 * len(source)
    if name == "many.parquet":
        assert len(manifest_of(Path("all"))["held_out"]["groups"]) == 16
        assert len(train) >= len(source) - 32
    else:
        assert sorted(val + train) == sorted(source)


@pytest.mark.parametrize("order", [pytest.param("shuffled", marks=pytest.mark.slow), "prefix"])
def test_a_row_group_without_text_is_left_out_with_a_warning(order):
    texts = [None] * 8 + TEXTS * 3
    pq.write_table(pa.table({"text": texts}), "a.parquet", row_group_size=4)
    flags = ["--tokenizer=byte", "--val_tokens=2k", f"--order={order}", "--out=out"]
    result = run(FINEWEB, "--source=a.parquet", *flags)
    assert result.code == 0 and "8 of " in result.err and "no text" in result.err


def test_validation_is_spread_over_the_text_even_if_row_groups_differ_in_size():
    """
    Prepare two files with the same amount of text, one in row groups five times as large. If whole
    groups would take much of the text, hold out single documents instead.
    """
    Path("source").mkdir()
    text = "the same number of words in each of the documents " * 4
    for name, size in (("a", 2), ("b", 10)):
        table = pa.table({"text": [f"{name}{n} {text}" for n in range(800)]})
        pq.write_table(table, f"source/{name}.parquet", row_group_size=size)
    flags = ["--source=source", "--tokenizer=byte", "--val_tokens=3k", "--tokens=10M"]
    prepare(*flags, "--out=out")
    val = stored_texts(Path("out"), "val")
    assert manifest_of(Path("out"))["held_out"].keys() == {"groups", "bytes_per_group"}
    assert 0.35 < sum(text[0] == "a" for text in val) / len(val) < 0.65
    write_jsonl(Path("source/c.jsonl"), ["all of it " * 3000])
    prepare(*flags, "--out=other")
    assert manifest_of(Path("other"))["held_out"].keys() == {"up_to_hash"}
    assert sum(len(stored_texts(Path("other"), split)) for split in ("val", "train")) == 1601


# -----------------------------------------------------------------------------
# Interrupted, and run again

# A preparation that kills itself as it is about to rename its n-th file: the first manifest, a
# shard, the manifest that lists it, ...
KILLED = """
import os, runpy, signal, sys
moment, replace = int(os.environ["MOMENT"]), os.replace
def replace_or_die(*arguments):
    global moment
    moment -= 1
    if moment == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*arguments)
os.replace = replace_or_die
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


THIRTEEN = (1, 2, 3, 2, 3, 4, 2, 3, 2, 3, 2, 3, 4)  # the moments at which one preparation is killed


@pytest.mark.parametrize(
    "line, moments",
    [
        ("book.txt rows.jsonl", (3, 5)),
        ("rows.parquet --val_tokens=2k --shard_tokens=3k", (1, 3, 2, 6)),
        slow(("rows.jsonl --val_tokens=2k --shard_tokens=3k --tokenizer=bpe:300", (1, 2, 4))),
        # the default tests shuffle rows.jsonl instead
        slow(("many.parquet --order=shuffled --val_tokens=2k --shard_tokens=3k", THIRTEEN)),
        ("rows.jsonl --order=shuffled --val_tokens=2k --shard_tokens=3k", (1, 3, 2, 5)),
    ],
)
def test_a_killed_preparation_continues_to_the_same_bytes(line, moments, tmp_path):
    """
    Kill the preparation up to thirteen times at different file renames, and launch it with another
    number of threads each time.
    """
    write_sources(tmp_path)
    script, *straight = command(line, tmp_path / "straight")
    prepare(*straight, script=script)
    _, *arguments = command(line, tmp_path / "out")
    for workers, moment in enumerate(moments, 1):
        words = [str(ROOT / script), *map(str, arguments), f"--workers={workers}"]
        killed = start("-c", KILLED, *words, cwd=tmp_path, MOMENT=str(moment))
        assert finish(killed).code == -signal.SIGKILL
        assert not Path("out/manifest.json").exists() or not manifest_of(Path("out"))["complete"]
    assert run(script, *arguments).code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


@needs_signals
def test_ctrl_c_says_how_to_continue_and_leaves_no_partial_file(tmp_path):
    write_sources(tmp_path)
    interrupted = KILLED.replace("SIGKILL", "SIGINT")
    script, *arguments = command("rows.jsonl --val_tokens=2k --shard_tokens=3k", tmp_path / "out")
    words = [str(ROOT / script), *map(str, arguments)]
    code, _, err = finish(start("-c", interrupted, *words, cwd=tmp_path, MOMENT="4"))
    assert code == 128 + signal.SIGINT
    assert err == "stopped: the same command continues after the last finished shard\n"
    assert not list(Path("out").glob("*.tmp"))
    result = run("train.py", f"--dataset={tmp_path / 'out'}", "--device=cpu", "--out_dir=run")
    refused(result, "out: is unfinished; ", "repeat the command that prepares it")


def test_a_full_disk_is_reported_and_the_same_command_continues_later(tmp_path, make_disk):
    write_sources(tmp_path)
    out = make_disk(2**16) / "out"
    flags = ["--source=rows.jsonl", "--order=prefix", *FLAGS, "--shard_tokens=5k", "--tokens=10M"]
    code, _, err = run(FINEWEB, *flags, f"--out={out}")
    warning, error = err.splitlines()
    assert code == 1
    assert warning.startswith(f"warning: {out}: needs 0.02 GB of disk, has 0.00 GB")
    assert error.startswith(f"error: {out}: No space left on device; ")
    assert "the same command continues" in error
    assert 1 < len(digests(out)) and not list(out.rglob("*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=2m", str(out.parent)], check=True)
    prepare(*flags, f"--out={out}")
    prepare(*flags, "--out=straight")
    assert contents(out) == contents(Path("straight"))


# flags after those of a finished folder, and words of the refusal
CHANGES = [
    ("--tokens=8k", ""),
    ("--tokens=1k", ""),
    ("--tokens=14k", "--out=out_14k"),
    ("--val_tokens=3k", "val_tokens another --out"),
    ("--shard_tokens=8k", "shard_tokens another --out"),
    ("--tokenizer=bpe:300", "vocab another --out"),
    ("--text_field=id", "--text_field=NAME"),
    ("--source=many.parquet", "files another --out"),
]


@pytest.mark.parametrize("flag, words", CHANGES)
def test_a_finished_folder_is_never_changed(flag, words, tmp_path):
    """Nobody would know what it holds."""
    write_sources(tmp_path)
    flags = ["--source=rows.jsonl", *FLAGS, "--order=prefix", "--tokens=8k", "--out=out"]
    prepare(*flags)
    before = contents(Path("out"))
    result = run(FINEWEB, *flags, flag)
    if words:
        refused(result, *words.split())
    else:
        assert result.code == 0 and "complete, nothing to do" in result.out
    assert contents(Path("out")) == before


def test_a_source_may_be_repaired_until_the_folder_is_complete():
    """Continue with a warning after a broken line is fixed. Refuse changed text afterwards."""
    # more lines than are read in advance
    lines = [json.dumps(dict(text=text)) for text in TEXTS * 4]
    flags = ["--source=a.jsonl", *FLAGS, "--order=prefix", "--shard_tokens=9k"]
    Path("a.jsonl").write_text("\n".join(lines))
    prepare(*flags, "--out=straight")
    Path("a.jsonl").write_text("\n".join([*lines[:2000], lines[2000][:-5], *lines[2001:]]))
    code, _, err = run(FINEWEB, *flags, "--out=out")
    assert code == 1 and "a.jsonl: line 2,001 is not" in err and "the same command continues" in err
    assert 3 < len(digests(Path("out"))) < len(digests(Path("straight")))
    Path("a.jsonl").write_text("\n".join(lines))
    code, _, err = run(FINEWEB, *flags, "--out=out")
    assert code == 0 and err.startswith("warning: a.jsonl: ") and err.count("\n") == 1
    assert "delete out and begin again" in err
    assert digests(Path("out")) == digests(Path("straight"))
    before = contents(Path("out"))
    Path("a.jsonl").write_text("\n".join(lines[:-1]))
    refused(run(FINEWEB, *flags, "--out=out"), "(files); give another --out")
    assert contents(Path("out")) == before


@pytest.mark.parametrize(
    "line, complete", [("book.txt rows.jsonl", True), ("rows.parquet --val_tokens=2k", False)]
)
def test_a_source_file_may_get_a_new_date_but_not_another_size(line, complete, tmp_path):
    """Warn once of another date, also if the manifest has hashes, as it had before 0.4.0."""
    write_sources(tmp_path)
    script, *arguments = command(line, Path("out"))
    prepare(*arguments, script=script)
    before, manifest = digests(Path("out")), manifest_of(Path("out"))
    stamps = {name: [*stamp, "hash"] for name, stamp in manifest["files"].items()}
    noted = manifest | dict(complete=complete, files=stamps)
    Path("out/manifest.json").write_text(json.dumps(noted))
    assert run(script, *arguments).err == ""
    for name in stamps:
        os.utime(name, ns=(1, 10**18))
    code, _, err = run(script, *arguments)
    assert code == 0 and err.count("\n") == 1 and f"warning: {[*stamps][0]}: " in err
    assert f"(such files: {len(stamps)})" in err
    assert run(script, *arguments).err == "" and digests(Path("out")) == before
    with open([*stamps][0], "ab") as file:
        file.write(b"\n")
    before = contents(Path("out"))
    assert run(script, *arguments).code == 2 and contents(Path("out")) == before


def test_warns_if_validation_takes_much_of_a_small_source():
    """Suggest a --val_tokens that gives no warning."""
    write_jsonl(Path("a.jsonl"), [f"document {n:04d}" for n in range(1000)])
    flags = ["--source=a.jsonl", "--tokenizer=byte", "--out=out"]
    # a twentieth of 14,000
    refused(run(FINEWEB, *flags), "0 for training", "--val_tokens=700")
    result = run(FINEWEB, *flags, "--val_tokens=7k")
    held = re.search(r"7,\d{3} of 14,000 tokens are held out .* --val_tokens=(\S+)\n", result.err)
    assert not run(FINEWEB, *flags, f"--val_tokens={held[1]}", "--out=2").err


HOLDS_THE_LOCK = """
import sys, time
from common.files import try_lock
with open(sys.argv[1], "ab") as file:
    print("locked:", try_lock(file), flush=True)
    time.sleep(60)
"""


def test_a_second_preparation_in_one_folder_is_refused(tmp_path):
    """Wait ten seconds for the first one to end."""
    write_sources(tmp_path)
    flags = ["--source=rows.jsonl", *FLAGS, "--order=prefix", "--out=out"]
    Path("out").mkdir()
    first = start("-c", HOLDS_THE_LOCK, str(tmp_path / "out/lock"))
    wait_for_line(first, "locked: True")
    hands = [time.monotonic()]
    with (
        mock.patch("time.sleep", lambda seconds: hands.append(hands[-1] + seconds)),
        mock.patch("time.monotonic", lambda: hands[-1]),
    ):
        result = run(FINEWEB, *flags)
    assert 10 < hands[-1] - hands[0] < 11  # seconds, which a preparation may take to end
    refused(result, "out: another preparation is writing to it")
    first.kill()
    finish(first)
    prepare(*flags)


# -----------------------------------------------------------------------------
# The hub

# As on Windows, there are no symbolic links, about which the hub's library would warn at length.
# Pauses take no time, but each is printed.
ON_THE_HUB = """
import os, runpy, sys, time
def refuse(*_, **__):
    raise OSError(22)
os.symlink = refuse
time.sleep = lambda seconds: seconds >= 5 and print("slept", seconds)  # the library's are shorter
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def from_hub(address: str, out: Path, *more: str, code: str = ON_THE_HUB):
    """Start a preparation that reads from a local server in place of the hub."""
    flags = ["--dataset=org/name", "--name=small", *FLAGS, "--shard_tokens=4k", f"--out={out}"]
    flags += ["--workers=1"]  # one thread reads less ahead
    hub = dict(HF_ENDPOINT=address, HF_HOME=str(out.parent), HF_HUB_OFFLINE="0")
    return start("-c", code, str(ROOT / FINEWEB), *flags, *more, **hub)


def test_the_hubs_files_make_the_shards_that_local_files_make(tmp_path):
    """
    Retry for an hour when the hub fails, then stop. The same command continues at the same
    revision.
    """
    source, out = tmp_path / "source", tmp_path / "out"
    write_parquet(source / "a.parquet", TEXTS[:350])
    write_jsonl(source / "b.jsonl", TEXTS[350:])
    sizes = [*FLAGS, "--shard_tokens=4k", "--order=prefix"]
    prepare(f"--source={source}", *sizes, f"--out={tmp_path / 'straight'}")
    with serve_hub(source) as address:
        Hub.allowed = {"small/b.jsonl": 1}  # one request, for the first rows
        code, said, err = finish(from_hub(address, out, "--order=prefix"))
        assert code == 1, err
        *warnings, error = err.splitlines()
        pauses = [float(line.split()[1]) for line in said.splitlines() if "slept" in line]
        assert 3600 <= sum(pauses) < 4000 and pauses == sorted(pauses)
        assert len(warnings) == len(pauses) and all("again in " in line for line in warnings)
        assert error.startswith("error: hf://datasets/org/name@") and "same command" in error
        assert 0 < len(digests(out)) < len(digests(tmp_path / "straight"))
        Hub.allowed, Hub.newest = {}, "b" * 40  # a newer revision has appeared
        code, _, err = finish(from_hub(address, out, "--order=prefix"))
        assert (code, err) == (0, "")
    assert digests(out) == digests(tmp_path / "straight")
    assert manifest_of(out)["revision"] == REVISION


@pytest.mark.parametrize(
    "flags, asked",
    [
        ("", ("HuggingFaceFW/fineweb-edu", "sample-10BT", "data/fineweb_edu")),
        (
            "--dataset=fineweb --sample=100B",
            ("HuggingFaceFW/fineweb", "sample-100BT", "data/fineweb_100B"),
        ),
        ("--dataset=org/name --name=small", ("org/name", "small", "data/name")),
    ],
)
def test_flags_choose_the_hubs_dataset_and_the_default_folder(flags, asked):
    arguments = prepare_fineweb.parse_arguments([*flags.split(), "--tokenizer=byte"])
    assert arguments.tokens == 10**9  # a part of it, but all of local files
    assert prepare_fineweb.parse_arguments(["--source=a.jsonl", "--out=out"]).tokens is None
    assert str(prepare_fineweb.default_folder(arguments)) == str(Path(asked[2]))
    hub_files = mock.Mock(side_effect=UserError("asked"))
    with mock.patch("data.prepare_fineweb.hub_files", hub_files), pytest.raises(UserError):
        prepare_fineweb.main([*flags.split(), "--tokenizer=byte"])
    assert hub_files.call_args.args[:2] == asked[:2]


def test_without_a_network_one_line_suggests_local_files(tmp_path):
    result = finish(from_hub("http://127.0.0.1:9", tmp_path / "out"))
    refused(result, "give --source=FILES")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # takes a minute, nearly all of it waiting
def test_a_slow_or_failing_hub_does_not_change_the_shards(tmp_path):
    """
    Answer six of the shuffle's requests for byte ranges late, in part, or with error 429 or 503.
    """
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    pq.write_table(pa.table({"text": (TEXTS * 3)[:2000]}), source / "a.parquet", row_group_size=5)
    with serve_hub(source) as address:
        assert finish(from_hub(address, tmp_path / "straight")).code == 0
        Hub.ranges = 0
        Hub.troubles = {9: "slow", 20: "break", 40: 429, 41: 429, 60: 503, 80: "break"}
        code, _, err = finish(from_hub(address, out))
        assert code == 0, err
        assert not Hub.troubles  # all of them were met
    assert digests(out) == digests(tmp_path / "straight")


# -----------------------------------------------------------------------------
# What is printed


def test_prints_a_training_command_for_the_prepared_dataset(capsys):
    """
    Quote a name with a space, and print ./NAME if data/NAME exists too, so that train.py reads the
    right one.
    """
    Path("my notes.txt").write_text("a line\n" * 400)
    result = prepare("my notes.txt", script="data/prepare_text.py")
    *_, last = result.out.splitlines()
    words = "config/quickstart.py '--dataset=my notes' '--out_dir=out/quickstart_my notes'"
    assert last.replace('"', "'") == f"next: python train.py {words}"
    again = prepare("my notes.txt", script="data/prepare_text.py").out.splitlines()
    assert again == ["data/my notes: complete, nothing to do", *result.out.splitlines()]
    gpt2 = dict(manifest_of(Path("data/my notes")), tokenizer="gpt2")
    writer.say_what_it_holds(Path("data/my notes"), gpt2)
    assert "config/finetune_gpt2.py " in capsys.readouterr().out.splitlines()[-1]
    write_jsonl(Path("my notes.jsonl"), TEXTS)
    flags = ["--source=my notes.jsonl", "--tokenizer=byte", "--val_tokens=100", "--out=my notes"]
    *_, last = prepare(*flags).out.splitlines()
    assert "--dataset=./my notes" in last
    small = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=16", "--eval_tokens=16"]
    small += ["--device=cpu", "--compile=False", "--eval_only=True"]
    train = run("train.py", "--dataset=./my notes", *small)
    assert train.code == 0 and "data: my notes, " in train.out, train
