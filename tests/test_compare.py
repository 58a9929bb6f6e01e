"""
Check compare.py's table and picture against figures worked out by hand from the same records and
logs.
"""

import json
import math
import re
import shutil
import statistics
import sys
from pathlib import Path
from unittest import mock

import mpmath
import numpy as np
import pytest
from documents import on_hub
from program import ROOT, InProcessRun, Result, Run, run, train, write_tokens

from reports import seeds

TINY = dict(n_layer=1, n_embd=16, max_iters=4, eval_interval=2, eval_tokens=256)


def write_records(folder: Path, *lines: dict) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def write_run(
    folder: Path,
    val_losses: dict[int, float],
    step_ms: float = 100,
    bits: float | None = None,
    start: dict | None = None,
    measures: dict | None = None,
    **config,
) -> Path:
    """
    Write a finished run: a record for every iteration, evaluations of 2 s and, with each but the
    first, a checkpoint of 1 s. `bits` is the bits per byte of a loss of 1; `start` adds or
    replaces fields of the start record, and `measures` adds fields to each evaluation.
    """
    first = dict(
        kind="start",
        iter=0,
        config=dict(dataset="d", eval_tokens=4096, gradient_accumulation_steps=4) | config,
        parameters=5000,
        device="card",
        dtype="bfloat16",
        flops_per_token=1000,
        tokens_per_iter=1000,
        world_size=1,
        tokenizer="gpt2",
        data_fingerprint="all",
        val_fingerprint="val",
    )
    first |= start or {}
    size = first["tokens_per_iter"]
    last = max(val_losses)
    lines = [first]
    hours = 0.0
    for it in range(last + 1):
        if it in val_losses:
            hours += 2 / 3600
            loss = val_losses[it]
            line = dict(kind="eval", iter=it, tokens=it * size, hours=hours, seconds=2)
            line |= dict(val_loss=loss, bits_per_byte=bits and loss * bits)
            lines.append(line | (measures or {}))
        if it in val_losses and it > 0:
            lines.append(dict(kind="checkpoint", iter=it, path="x", bytes=1, seconds=1))
            hours += 1 / 3600
        if it < last:
            hours += step_ms / 3.6e6
            tokens = dict(tokens=it * size, tokens_after=(it + 1) * size)
            speed = dict(step_ms=step_ms, tokens_per_sec=size / step_ms * 1000, mfu=0.5)
            step = dict(kind="step", iter=it, loss=4 + (-1) ** it, lr=0.1, hours=hours)
            lines.append(step | tokens | speed)
    end = dict(kind="end", reason="max_iters", iters=last, tokens=last * size, hours=hours)
    return write_records(folder, *lines, end)


class Table:
    """Hold what `python compare.py ARGUMENTS --json=...` says."""

    def __init__(self, *arguments):
        file = Path(arguments[0]).parent / "table.json"
        self.result: Result = run("compare.py", *arguments, f"--json={file}")
        assert self.result.code == 0, self.result.err
        table = json.loads(file.read_text())
        self.runs = table["runs"]
        self.verdicts = table["verdicts"]
        self.warnings = table["warnings"]

    def values(self, key: str) -> list:
        return [figures[key] for figures in self.runs.values()]

    def keys(self, beginning: str) -> list[str]:
        return [key for key in next(iter(self.runs.values())) if key.startswith(beginning)]


# -----------------------------------------------------------------------------
# Figures and verdicts


def test_compares_two_runs_at_equal_iterations_tokens_and_hours(tmp_path):
    """Interpolate val losses at the last iteration, token count and time that both runs reached."""
    losses = {0: 8.0, 50: 4.0, 90: 3.2, 100: 3.0}
    a = write_run(tmp_path / "a", losses, step_ms=36_000, learning_rate=1e-3)
    losses = {0: 8.0, 40: 4.0, 46: 3.8, 54: 3.4, 95: 2.5}
    twice = dict(tokens_per_iter=2000, world_size=2)
    b = write_run(tmp_path / "b", losses, step_ms=72_000, start=twice, learning_rate=2e-3)
    table = Table(a, b, "--loss=4")
    assert table.keys("")[:3] == [
        f"val_loss_at_equal_{axis}" for axis in ("iter", "tokens", "hours")
    ]
    assert table.values("config/learning_rate") == [1e-3, 2e-3]
    assert table.values("tokens") == [100_000, 190_000]
    assert table.values("tokens_per_iter") == [1000, 2000]
    # 100 iterations of 36 s, 4 evaluations of 2 s, 3 checkpoints of 1 s
    assert table.runs["a"]["hours"] == pytest.approx((3600 + 8 + 3) / 3600)
    assert table.values("evaluations") == [4, 5]
    assert table.values("checkpoints") == [3, 4]
    assert table.values("pause_seconds") == [4 * 2 + 3 * 1, 5 * 2 + 4 * 1]
    # 4 micro-batches on one GPU; 2 on each of two
    # at iteration 95, a is half-way from 3.2 to 3.0
    assert table.values("val_loss_at_equal_iter") == pytest.approx([3.1, 2.5])
    assert table.verdicts["val_loss_at_equal_iter"] == "b 0.6000 lower"
    # 100,000 tokens are b's iteration 50: half-way from 3.8 to 3.4
    assert table.values("val_loss_at_equal_tokens") == pytest.approx([3.0, 3.6])
    # a's last evaluation ends after 3600 + 8 + 2 s; b's third and fourth after 3312 + 6 + 1 s and
    # 3888 + 8 + 2 s
    between = (3610 - 3319) / (3898 - 3319)
    at_a_hours = table.values("val_loss_at_equal_hours")
    assert at_a_hours == pytest.approx([3.0, 3.8 - 0.4 * between])
    assert table.values("tokens_to_loss") == [50_000, 80_000]
    assert table.values("hours_to_loss") == pytest.approx([1804 / 3600, 2884 / 3600])
    assert table.verdicts["tokens_to_loss"] == "a 1.60x less"
    assert "step_ms_p50" not in table.verdicts  # 36 and 72 s, but for unequal tokens


@pytest.mark.parametrize(
    "one, other, size, expected",
    [
        # the iterations evaluated in one run and in the other, and those that both have
        ([0, 10, 20, 25, 30], [0, 10, 15, 20, 30], 1000, [10, 20, 30]),
        # at most eight, evenly spaced, the last among them
        (range(0, 401, 10), range(0, 401, 5), 1000, range(50, 401, 50)),
        # one run's iterations have twice as many tokens: at equal tokens
        ([0, 20, 40, 60], [0, 10, 20, 30], 2000, [20_000, 40_000, 60_000]),
    ],
)
def test_shows_at_most_eight_evaluations_that_all_runs_share(one, other, size, expected, tmp_path):
    """
    Show the val losses of evenly spaced evaluations, by iteration or, if the runs' iterations
    differ in tokens, by token count.
    """
    a = write_run(tmp_path / "a", {it: 9 - it / 100 for it in one})
    start = dict(tokens_per_iter=size)
    b = write_run(tmp_path / "b", {it: 8 - it / 100 for it in other}, start=start)
    table = Table(a, b)
    axis = "iter" if size == 1000 else "tokens"
    keys = table.keys(f"val_loss_at_{axis}/")
    # the last evaluation is in the row at equal iterations or tokens
    assert [int(key.partition("/")[2]) for key in keys] == list(expected)[:-1]
    for key in keys:
        at = int(key.partition("/")[2]) / (1000 if axis == "tokens" else 1)
        assert table.values(key) == pytest.approx([9 - at / 100, 8 - at * 1000 / size / 100])
        assert table.verdicts[key].startswith("b ")


@pytest.mark.parametrize(
    "loss, iterations, shown",
    [
        (1.85, 525, "525k"),  # half-way between two evaluations
        (1.9, 500, "500k"),
        (2.0, None, "by 500k"),  # passed before the first evaluation
        (1.7, None, "n/a"),  # never reached
    ],
)
def test_says_how_many_tokens_a_loss_took_if_that_is_known(loss, iterations, shown, tmp_path):
    """
    Interpolate between two evaluations, but not from iteration 0, where the loss falls steeply. Of
    a run whose evaluations are too far apart, show the first one that was below the loss.
    """
    a = write_run(tmp_path / "a", {0: 5.4, 500: 1.9, 550: 1.8})
    b = write_run(tmp_path / "b", {0: 5.4, 300: 3.0, 550: 1.0})
    table = Table(a, b, f"--loss={loss}")
    tokens = table.runs["a"]["tokens_to_loss"]
    assert tokens == (iterations and pytest.approx(iterations * 1000))
    (row,) = re.findall(r"^tokens to val loss [\d.]+ +(.+?)  ", table.result.out, re.MULTILINE)
    assert row == shown


def curve(interval: int, last: int) -> dict[int, float]:
    """Evaluate a steep curve. A line from iteration 0 would be off by 1.2 at iteration 300."""
    return {it: 1.2 + 4.2 / (1 + it / 40) ** 0.8 for it in range(0, last + 1, interval)}


def ends(loss: float, at: int = 10) -> dict[int, float]:
    return {0: 8.0, at: loss}


AT_EQUAL = ("val_loss_at_equal_iter", "val_loss_at_equal_tokens")
VERDICTS = [  # losses of each run, the ms of their iterations, the loss to reach; keys, the verdict
    # within 0.5%, or 0.005 nats
    ([ends(3.0)] * 3, (100, 100, 100), None, ["tokens_per_sec"], "equal"),
    ([ends(3.0)] * 2, (100, 100.4), None, ["tokens_per_sec"], "equal"),
    ([ends(3.0)] * 3, (100, 125, 200), None, ["tokens_per_sec"], "a 1.25x faster"),
    ([ends(3.0)] * 3, (100, 100, 200), None, ["tokens_per_sec"], None),  # the best two tie
    ([ends(3.0), ends(3.001), ends(3.004)], (), None, ["best_val_loss"], "equal within 0.005"),
    ([ends(3.0), ends(3.0134)], (), None, ["best_val_loss"], "a 0.0134 lower"),
    ([ends(3.0), ends(3.001), ends(4.0)], (), None, ["best_val_loss"], None),
    # nanoGPT makes one iteration more than max_iters
    ([ends(3.0, 200), ends(3.0, 201)], (), None, ["iterations"], "equal"),
    # interpolates at iteration 100 if the gap is at most a fifth of the iterations so far
    ([ends(3.5, 100), {0: 8.0, 90: 3.1, 110: 2.9}], (), None, AT_EQUAL[:1], "b 0.5000 lower"),
    ([ends(3.5, 100), {0: 8.0, 75: 3.1, 125: 2.9}], (), None, AT_EQUAL[:1], None),
    # one loss curve, evaluated at different iterations
    ([curve(20, 300), curve(20, 1500)], (), 2.2, [*AT_EQUAL, "tokens_to_loss"], "equal.*"),
    ([curve(30, 600), curve(41, 1025)], (), 1.8, [*AT_EQUAL, "tokens_to_loss"], "equal.*"),
    ([curve(70, 1400), curve(400, 1600)], (), 1.6, AT_EQUAL, "equal.*"),
    ([curve(70, 1400), curve(400, 1600)], (), 1.7, ["tokens_to_loss"], None),
]


@pytest.mark.parametrize("losses, ms, loss, keys, verdict", VERDICTS)
def test_prefers_a_run_only_beyond_small_differences(losses, ms, loss, keys, verdict, tmp_path):
    runs = [
        write_run(tmp_path / name, values, step_ms=step_ms)
        for name, values, step_ms in zip("abc", losses, ms or [100] * 3, strict=False)
    ]
    found = Table(*runs, *([f"--loss={loss}"] if loss else [])).verdicts
    for key in keys:
        assert re.fullmatch(verdict, found[key]) if verdict else key not in found


# -----------------------------------------------------------------------------
# Which losses compare

BYTES = dict(tokenizer="byte", val_fingerprint="bytes", data_fingerprint="bytes")
BPE = dict(tokenizer="bpe 1a2b", val_fingerprint="bpe", data_fingerprint="bpe")
TEXT = dict(val_text_sha256="text", val_tokens=4096)
OTHER = TEXT | dict(val_text_sha256="b")
LOSS, BITS = "b 0.5000 lower", "b 0.2500 lower"  # of 3.0 and 2.5 nats, 1.5 and 1.25 bits
NO = "not comparable"


def read(val_tokens: int | None = None, **config) -> dict:
    """Return keys by which a run evaluates a part of so many validation tokens."""
    sizes = dict(eval_tokens=0, block_size=512, batch_size=8)
    return sizes | config | dict(start=dict(val_tokens=val_tokens))


COMPARED = [  # of runs a and b: their losses, their bits per byte, words of a warning
    # the same validation tokens, whatever was trained on
    (dict(), dict(data_fingerprint="more"), LOSS, None, ""),
    (dict(), dict(val_fingerprint="others"), NO, NO, "different validation tokens"),
    # another tokenizer
    (BYTES | TEXT, BPE | TEXT, NO, BITS, "different tokenizers; bits per byte are"),
    (BYTES | TEXT, BPE | OTHER, NO, NO, "different validation texts"),
    (BYTES | TEXT, BPE, NO, NO, "unknown validation text"),
    (BYTES, BPE, NO, NO, "unknown validation text"),
    # of 5,000 tokens only the first 4,096 were evaluated
    (BYTES | TEXT, BPE | TEXT | dict(val_tokens=5000), NO, NO, "--eval_tokens=5000"),
    # the same text in other files
    (TEXT, TEXT | dict(val_fingerprint="files"), NO, BITS, "bits per byte are"),
]
EVALUATED = [
    (read(eval_tokens=4096), read(eval_tokens=8192), NO),
    # by eval_iters: 1 x 8 x 512 and 2 x 4 x 512; without the second iteration half as many
    (read(eval_iters=1), read(eval_iters=2, batch_size=4), LOSS),
    (read(eval_iters=1), read(eval_iters=1, batch_size=4), NO),
    # the split is so small that both evaluate all of it
    (read(3000, eval_tokens=4096), read(3000, eval_tokens=8192), LOSS),
    # whole windows count: 6 x 512 = 3 x 1024, but 7 x 512 > 3 x 1024
    (read(eval_tokens=3500), read(eval_tokens=3500, block_size=1024), LOSS),
    (read(eval_tokens=3600), read(eval_tokens=3600, block_size=1024), NO),
    # each window has one more token, the last one's target: 5 x 512, and 2 x 1024, of 3,072
    (read(3072, eval_tokens=3072), read(3072, eval_tokens=3072, block_size=1024), NO),
    (read(3073, eval_tokens=3072), read(3073, eval_tokens=3072, block_size=1024), LOSS),
]


@pytest.mark.parametrize(
    "of_a, of_b, loss, bits, said",
    [(dict(start=a), dict(start=b), *rest) for a, b, *rest in COMPARED]
    + [(a, b, loss, *((None, "") if loss == LOSS else (NO, "eval_"))) for a, b, loss in EVALUATED],
)
def test_compares_losses_on_equal_tokens_and_bits_per_byte_on_equal_text(
    of_a, of_b, loss, bits, said, tmp_path
):
    """
    Compare losses if the same validation tokens were evaluated, as worked out from each run's
    settings, and bits per byte if only the text is; otherwise say why the runs are not comparable.
    """
    a = write_run(tmp_path / "a", {0: 8.0, 5: 3.0}, bits=0.5, **of_a)
    b = write_run(tmp_path / "b", {0: 8.0, 5: 2.5}, bits=0.5, dataset="other", **of_b)
    table = Table(a, b)
    assert table.verdicts["best_val_loss"] == table.verdicts["val_loss_at_equal_iter"] == loss
    assert ("tokens_to_loss" in table.runs["a"]) == (loss != NO)
    # where losses compare, bits per byte have no second verdict
    assert table.verdicts.get("best_bits_per_byte") == bits
    assert len(table.warnings) == bool(said)
    assert all(said in line for line in table.warnings)


@pytest.mark.parametrize("bits, verdict", [(1.5016, "equal within 0.002"), (1.503, "a 0.0030")])
def test_calls_bits_per_byte_within_the_noise_of_seeds_equal(bits, verdict, tmp_path):
    """0.005 nats per token are 0.0016 bits per byte with tokens of 4.5 bytes."""
    a = write_run(tmp_path / "a", ends(3.0), bits=0.5, start=BYTES | TEXT)
    b = write_run(tmp_path / "b", ends(1.0), bits=bits, start=BPE | TEXT)
    assert Table(a, b).verdicts["best_bits_per_byte"].startswith(verdict)


def test_compares_runs_on_few_and_many_tokens_of_one_source(tiny, tmp_path, monkeypatch):
    """
    Compare losses without a warning if one run trained on more of the same documents, as in
    docs/compare.md. A copied folder counts as the same dataset.
    """
    monkeypatch.chdir(tmp_path)
    text = json.dumps(dict(text="the quick brown fox jumps over the lazy dog " * 4))
    Path("docs.jsonl").write_text(f"{text}\n" * 300)
    source = ["--dataset=org/name", "--tokenizer=byte", "--val_tokens=1000"]
    for name, tokens in (("few", 4000), ("many", 16_000)):
        command = [*source, f"--tokens={tokens}", "--shard_tokens=4000", f"--out={name}"]
        with on_hub("docs.jsonl"):
            result = run("data/prepare_fineweb.py", *command)
        assert result.code == 0, result.err
        train(**tiny | dict(dataset=f"./{name}", out_dir=f"out-{name}"))
    shutil.copytree("few", "copy")
    train(**tiny | dict(dataset="./copy", out_dir="out-copy", learning_rate=0.01))

    table = Table(tmp_path / "out-few", tmp_path / "out-many")
    assert table.verdicts["config/dataset"] == "differs"
    assert table.verdicts["val_loss_at_equal_tokens"] != NO
    assert table.warnings == []
    # a copy is the same dataset, whatever it is called
    table = Table(tmp_path / "out-few", tmp_path / "out-copy")
    assert table.keys("config/") == ["config/learning_rate"]


# -----------------------------------------------------------------------------
# The records of real runs


def test_reports_and_draws_a_real_run(tiny, tmp_path):
    """
    Report the speed, losses, pauses and hours that the run itself recorded, and write loss.png. The
    run records the hash and length of its validation text, by which compare.py matches runs.
    """
    folder, out_dir = write_tokens(tmp_path / "tokens", train=[2000], val=[300]), tmp_path / "run"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | dict(val_text_sha256="of this")))
    keys = tiny | dict(max_iters=12, eval_interval=5, log_interval=3)
    InProcessRun(fake_clock=True).launch(**keys | dict(dataset=folder, out_dir=out_dir))
    table = Table(out_dir)
    figures = table.runs["run"]
    assert (out_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    seen = Run(out_dir)
    assert seen.column("start", "val_text_sha256", "val_tokens") == [("of this", 300)]
    assert (figures["iterations"], figures["tokens"]) == (12, 12 * 128)
    assert figures["tokens_per_sec"] == pytest.approx(np.median(seen.steps("tokens_per_sec")))
    assert figures["best_val_loss"] == min(seen.evals("val_loss"))
    pauses = seen.evals("seconds") + seen.column("checkpoint", "seconds")
    assert figures["pause_seconds"] == pytest.approx(sum(pauses))
    in_run = sum(seen.end["ledger"][name] for name in ("steps", "evaluation", "checkpoints"))
    # allows for a record's nine digits, and for what ends after the last lap
    assert figures["hours"] == pytest.approx(in_run / 3600, rel=1e-2)


def test_counts_iterations_by_the_end_record_or_the_last_line_of_a_killed_run(tmp_path):
    step = dict(kind="step", iter=25, tokens_after=26_000, hours=25, loss=3)
    end = dict(kind="end", reason="SIGTERM", iters=41, tokens=41_000, hours=41)
    table = Table(write_records(tmp_path / "a", step, end), write_records(tmp_path / "b", step))
    assert (table.values("iterations"), table.values("tokens")) == ([41, 26], [41_000, 26_000])
    assert table.values("hours") == [41, 25]
    assert table.verdicts["iterations"] == "a 1.58x more"


EMPTY = """\
{"kind": "step", "iter": 0, "loss": NaN, "step_ms": null, "mfu": null}
{"kind": "eval", "iter": 9, "val_loss": null}
[1]
\0\ufffd
{"kind": "step", "iter": 99, "tok"""  # torn by a kill


def test_ignores_broken_and_empty_records(tmp_path):
    """Ignore torn lines, unknown JSON and records without figures in metrics.jsonl."""
    a, b = (write_run(tmp_path / name, {0: 8.0, 5: 3.0}) for name in "ab")
    with open(a / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(EMPTY)
    verdicts = Table(a, b).verdicts
    assert verdicts["best_val_loss"] == "equal within 0.005"
    assert verdicts["tokens_per_sec"] == "equal"


@pytest.mark.parametrize(
    "config, differs",
    [
        (dict(compile=False), ["config/compile"]),
        (dict(dropout=0.1), ["config/dropout"]),  # a run from before this key has the key's default
        (dict(out_dir="b", wandb_run_name="b", old_key=1), []),
    ],
)
def test_shows_a_row_for_each_setting_that_differs(config, differs, tmp_path):
    """
    Ignore out_dir, the run's name and unknown keys; a key that an older run lacks has its default.
    """
    a = write_run(tmp_path / "a", {0: 8.0, 5: 3.0})
    b = write_run(tmp_path / "b", {0: 8.0, 5: 3.0}, **config)
    assert Table(a, b).keys("config/") == differs


def test_warns_about_keys_that_a_resume_changed(tmp_path):
    """
    Warn about max_iters and show its value after the resume. For init_from, show the value with
    which the run began.
    """
    # a name that holds the time of day, as in nanoGPT's config files, is no change
    first = dict(max_iters=30, init_from="gpt2", wandb_run_name="mini-1")
    resumed = dict(max_iters=60, init_from="resume", wandb_run_name="mini-2")
    starts = [dict(kind="start", iter=0, config=config) for config in (first, resumed)]
    step = dict(kind="step", iter=0, loss=3)
    a = write_records(tmp_path / "a", *starts, step)
    b = write_records(tmp_path / "b", starts[1], step)
    table = Table(a, b)
    assert "resumed with other values of max_iters" in table.warnings[0]
    assert table.keys("config/") == ["config/init_from"]  # as the run began


# -----------------------------------------------------------------------------
# Seeds of a change against seeds of its base


def write_side(folder: Path, name: str, losses: list[float], **config) -> list[Path]:
    """Write one run for each final loss, with seeds 1, 2, and so on."""
    return [
        write_run(folder / f"{name}-{n}", ends(loss), seed=n, **config)
        for n, loss in enumerate(losses, start=1)
    ]


def against(folder: Path, change: list[Path], base: list[Path]) -> tuple[Result, dict, dict]:
    """Compare with --against; return the result, its printed `name: value` lines, and the JSON."""
    result = run("compare.py", *change, "--against", *base, f"--json={folder / 'seeds.json'}")
    assert result.code == 0, result.err
    lines = dict(re.findall(r"^(\w+): (\S+)$", result.out, re.MULTILINE))
    return result, lines, json.loads((folder / "seeds.json").read_text())


# Each side has three losses with a variance of 0.01: the error of a difference is sqrt(0.02 / 3),
# and Student's t is 2.776 with 4 degrees of freedom (any table).
@pytest.mark.parametrize(
    "first, verdict",
    [(1.7, "better"), (1.9, "inconclusive"), (2.1, "inconclusive"), (2.4, "worse")],
)
def test_calls_a_change_better_or_worse_only_beyond_the_noise(first, verdict, tmp_path):
    """
    Compare the mean losses of three seeds per side, and say what six seeds would show. The expected
    noise is computed by hand from Student's t: 2.228 with 10 degrees of freedom.
    """
    base = write_side(tmp_path, "base", [2.0, 2.1, 2.2])
    change = write_side(tmp_path, "idea", [first, first + 0.1, first + 0.2])
    result, lines, table = against(tmp_path, change, base)
    assert lines["verdict"] == table["verdict"] == verdict
    assert table["difference"] == pytest.approx(first - 2.0)
    assert table["noise"] == pytest.approx(2.776 * math.sqrt(0.02 / 3), rel=2e-3)
    assert float(lines["difference"]) == pytest.approx(table["difference"], abs=1e-4)
    assert float(lines["noise"]) == pytest.approx(table["noise"], abs=1e-4)
    more = [f"{2.228 * math.sqrt(0.02 / 6):.4f}"] if verdict == "inconclusive" else []
    assert re.findall(r"^with twice as many seeds, .* (0\.\d+)", result.out, re.MULTILINE) == more
    assert result.out.splitlines()[0].split() == ["idea", "base"]
    assert table["change"] == {f"idea-{n + 1}": pytest.approx(first + 0.1 * n) for n in range(3)}


@pytest.mark.parametrize(
    "change, base, verdict",
    [
        ([1.685, 1.714], [1.834, 1.855], "better"),  # 1.82 degrees of freedom; 1 would be too few
        ([1.0, 2.0, 3.0], [2.0, 2.1, 2.2], "inconclusive"),  # 2.04
        ([2.0, 2.1] * 20, [2.01, 2.12] * 20, "inconclusive"),  # 77.3
    ],
)
def test_the_noise_is_a_95_percent_interval_at_welchs_degrees_of_freedom(change, base, verdict):
    """Check with mpmath's incomplete beta function that 5% of Student's t lies beyond the noise."""
    found, noise = seeds.difference(change, base)
    a, b = (statistics.variance(side) / len(side) for side in (change, base))
    freedom = (a + b) ** 2 / (a**2 / (len(change) - 1) + b**2 / (len(base) - 1))
    t_squared = noise**2 / (a + b)
    beyond = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t_squared), regularized=True)
    assert float(beyond) == pytest.approx(0.05, rel=1e-4)
    assert seeds.verdict(found, noise) == verdict


@pytest.mark.parametrize("n_change, n_base", [(1, 3), (3, 1)])
def test_one_seed_on_a_side_is_inconclusive(n_change, n_base, tmp_path):
    """Say that one seed decides nothing, however large the difference."""
    change = write_side(tmp_path, "idea", [1.0, 1.001, 1.002][:n_change])
    base = write_side(tmp_path, "base", [3.0, 3.001, 3.002][:n_base])
    result, lines, table = against(tmp_path, change, base)
    assert lines["verdict"] == "inconclusive" and table["noise"] is None
    assert "one seed decides nothing" in result.err


def test_refuses_seeds_that_cannot_be_compared(tmp_path):
    """
    Exit with code 2 for unfinished runs, a seed or run used twice, and losses that are missing or
    not comparable.
    """
    base = write_side(tmp_path, "base", [2.0, 2.1])
    stopped, killed = (write_run(tmp_path / n, ends(2.0), seed=1) for n in ("stopped", "killed"))
    *records, end = (killed / "metrics.jsonl").read_text().splitlines()
    (killed / "metrics.jsonl").write_text("\n".join(records))
    by_signal = end.replace('"reason": "max_iters"', '"reason": "SIGTERM"')
    (stopped / "metrics.jsonl").write_text("\n".join([*records, by_signal]))
    twice, again = (write_run(tmp_path / name, ends(2.0), seed=2) for name in ("twice", "again"))
    other = write_run(tmp_path / "other", ends(2.0), start=dict(val_fingerprint="else"))
    for change, said in (
        ([stopped], "stopped: not trained to its end"),
        ([killed], "killed: not trained to its end"),
        ([twice, again], "has seed 2 too"),
        ([other], "losses are not comparable"),
        ([base[0]], "is on both sides"),
        ([write_run(tmp_path / "nan", ends(math.nan))], "has no val loss"),
    ):
        result = run("compare.py", *change, "--against", *base)
        assert result.code == 2 and said in result.err, (said, result)


def test_warns_if_seeds_trained_equal_hours_at_different_speeds(tmp_path):
    """
    Warn of speeds that differ by a factor of two, as on a machine that was busy for some seeds.
    """
    base = write_side(tmp_path, "base", [2.0, 2.1], hours=0.1)
    losses = ends(2.0)
    change = [
        write_run(tmp_path / f"idea-{n}", losses, step_ms=100 * n, seed=n, hours=0.1)
        for n in (1, 2)
    ]
    result, _, table = against(tmp_path, change, base)
    assert "seeds of idea differ 2.0x in speed" in result.err
    assert [warning[:13] for warning in table["warnings"]] == ["seeds of idea"]


# -----------------------------------------------------------------------------
# What nanoGPT printed


@pytest.fixture
def logs(tmp_path) -> tuple[Path, Path]:
    """
    Copy the first 600 iterations of two public runs on an RTX 4070: 16 x 32 sequences at n_embd
    384, and 8 x 64 at 768.
    """
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    for log, name in ((old, "fineweb_40m_rtx4070"), (new, "fineweb_124m_rtx4070")):
        text = (ROOT / f"results/public_runs/{name}.log").read_text()
        log.write_text(re.search(r".*\niter 600: .*?\n", text, re.DOTALL)[0])
    return old, new


def test_reads_speed_and_mfu_from_nanogpt_logs(logs):
    """Convert nanoGPT's MFU, a share of an A100's peak, to the RTX 4070's with --gpu=4070."""
    table = Table(*logs, "--gpu=4070")
    assert table.values("step_ms_p50") == [3903.44, 9342.61]  # without evaluations and compiling
    # 524288 / 3.90344 s and / 9.34261 s; 12.87% and 15.38% of an A100's 312 TFLOP/s over 58.3
    assert table.values("tokens_per_sec") == pytest.approx([134_314, 56_118], abs=1)
    assert table.values("mfu") == pytest.approx([0.689, 0.823], abs=2e-3)
    assert table.verdicts["tokens_per_sec"] == "old 2.39x faster"
    assert table.verdicts["val_loss_at_equal_iter"] == "equal within 0.03"  # 0.0273 lower
    assert table.values("config/batch_size") == [16, 8]
    assert table.values("parameters") == [40_560_000 + 1024 * 384, 124_354_560 + 19_200]
    assert sum("random batches" in warning for warning in table.warnings) == 1


NON_DECAYED = "num non-decayed parameter tensors: 25, with 1,000 parameters\n"
DECAYED = "num decayed parameter tensors: 50, with 40,950,000 parameters\n"


@pytest.mark.parametrize(
    "old, new, figures",
    [
        # eight cards, each with an eighth of the work: MFU is that of one card
        ("mfu 12.8", "mfu 1.60", dict(mfu=0.0161 * 312 / 58.3)),
        # a CPU has no share of a card's peak
        ("n_layer = 12", "n_layer = 12\ndevice = 'cpu'", dict(device="cpu", mfu=None)),
        # neither a formula nor text: unknown
        ("n_head = 6", "n_head = heads", {"config/n_head": None}),
        ("n_head = 6", "n_head = 2 * 3 # heads", {"config/n_head": 6}),
        ("n_head = 6", "n_head = 12\nOverriding: n_head = 6", {"config/n_head": 6}),
        # float32: the peak is 29.1 TFLOP/s with TF32
        ("n_layer", "dtype = 'float32'\nn_layer", dict(mfu=0.1287 * 312 / 29.1, dtype="float32")),
        ("will be", "were", dict(tokens_per_sec=None, mfu=None, dtype=None)),
        # two ranks, each of which prints its sums
        ("number of", DECAYED + 2 * NON_DECAYED, dict(parameters=40_951_000)),
    ],
)
def test_reads_what_a_nanogpt_log_says_and_leaves_the_rest_unknown(
    old, new, figures, logs, tmp_path
):
    """Read settings, parameters, speed and MFU, and report None for what the log does not say."""
    text = logs[0].read_text()
    logs[0].write_text(text.replace(old, new))
    six = write_run(tmp_path / "six", {0: 8.0, 500: 5.0}, n_head=6, dataset="fineweb")
    four = write_run(tmp_path / "four", {0: 8.0, 500: 5.0}, n_head=4, dataset="fineweb")
    found = Table(logs[0], six, four, "--gpu=4070").runs["old"]
    for key, value in figures.items():
        # an MFU is printed with three or four digits
        about = pytest.approx(value, rel=4e-3) if isinstance(value, float) else value
        assert found[key] == about, key


@pytest.mark.parametrize(
    "line, dataset, verdict, said",
    [
        ("dataset = 'fineweb'", "../nanoGPT/data/fineweb", "old 0.4672 lower", "random batches"),
        ("dataset = 'fineweb'", "other", NO, "different datasets"),
        ("", "data/openwebtext", "old 0.4672 lower", "random batches"),  # nanoGPT's default
        ("dataset = name", "fineweb", NO, "old does not name its dataset"),
    ],
)
def test_compares_with_nanogpt_if_the_datasets_have_the_same_name(
    line, dataset, verdict, said, logs, tmp_path
):
    """
    Warn that nanoGPT evaluates random batches; refuse to compare if the names differ or one is
    unknown.
    """
    logs[0].write_text(logs[0].read_text().replace("dataset = 'fineweb'", line))
    ours = write_run(tmp_path / "a", {0: 8.0, 500: 6.0}, dataset=dataset)
    table = Table(logs[0], ours)
    assert table.verdicts["best_val_loss"] == verdict
    assert sum(said in warning for warning in table.warnings) == 1


def test_reads_utf_16_logs_named_by_a_pattern(logs, tmp_path):
    """Read *.log files in UTF-16 with CRLF, as PowerShell writes them."""
    for log in logs:
        log.write_text(log.read_text(), encoding="utf-16", newline="\r\n")
    assert Table(tmp_path / "*.log").values("tokens_per_iter") == [524_288] * 2


def test_reads_what_it_can_from_a_few_lines_of_a_log(tmp_path):
    """Report the best val loss, and warn that the line with the tokens per iteration is missing."""
    log = tmp_path / "cut.log"
    step = "iter 700: loss 4.9, time 23900.00ms, mfu 12.93%\n"
    lines = f"step 700: train loss 6, val loss 7\n{step}{step.replace('0:', '1:')}"
    log.write_text(f"{lines}step 900: train loss 5, val loss 6\n")
    table = Table(log, write_run(tmp_path / "a", {0: 8.0, 900: 3.0}))
    assert table.runs["cut"]["best_val_loss"] == 6
    assert table.runs["cut"]["tokens_per_sec"] is None
    assert "tokens per iteration will be" in table.warnings[0]


# -----------------------------------------------------------------------------
# The band of a recipe that others ran several times

BAND = """\
# dataset = 'd'
# max_iters = 30
# eval_tokens = 4096
# tokens_per_iter = 1000
# tokens per iteration will be: 1,000
# tokens in an epoch: 30,000
iter,val_loss,low,high,sd
10,4.00,3.90,4.10,0.02
20,3.50,3.45,3.55,0.01
30,3.00,2.98,3.02,0.01
"""
NOT_COMPARABLE = "not comparable with the band of ten"


@pytest.fixture
def band(tmp_path) -> Path:
    path = tmp_path / "ten.csv"
    path.write_text(BAND)
    return path


IN_BAND = [  # val losses, and what the last line says of them
    ({10: 4.10, 20: 3.46, 30: 3.0}, "inside the band of ten at all 3 iterations"),
    ({10: 3.9, 20: 3.5}, "inside the band of ten at all 2 iterations"),  # still training
    ({10: 4.25, 20: 9.0}, "val loss 4.2500 at iteration 10 is 0.1500 outside the band of ten"),
    ({10: 4.0, 15: 9.0, 20: 3.41}, "val loss 3.4100 at iteration 20 is 0.0400 outside"),
    ({10: 4.0, 20: math.nan}, "val loss nan at iteration 20 is nan outside"),
    ({7: 4.0, 14: 3.5}, "--eval_interval=10"),
]
# settings, and what to choose instead. The dataset's name has to match, but not its folder.
OTHER_BAND = [
    (dict(dataset="data/other"), "train with --dataset=d"),
    (dict(tokens_per_iter=500), "train with --tokens_per_iter=1000"),
    (dict(max_iters=20, eval_tokens=0), "train with --max_iters=30 --eval_tokens=4096"),
    (dict(start=dict(val_tokens=2000)), "choose the same"),
    (dict(start=dict(train_tokens=29999)), "29,999 tokens and needs at least 30,000"),
    (dict(start=dict(train_tokens=30000)), ""),
    (dict(dataset="elsewhere/d"), ""),
]


@pytest.mark.parametrize(
    "losses, changes, said",
    [(losses, {}, said) for losses, said in IN_BAND]
    + [({10: 5.0}, changes, said or "val loss 5.0000") for changes, said in OTHER_BAND],
)
def test_last_line_says_whether_a_run_is_inside_the_band(losses, changes, said, band, tmp_path):
    """
    Name the first val loss outside the reference runs' band, and the page that says what to do, or
    else the settings with which the run would be comparable.
    """
    settings = dict(max_iters=30, tokens_per_iter=1000) | changes
    settings["start"] = changes.get("start", dict(tokens_per_iter=settings["tokens_per_iter"]))
    a = write_run(tmp_path / "a", {0: 8.0} | losses, **settings)
    result = run("compare.py", a, band)
    last = result.out.splitlines()[-1]
    verdict = said.startswith(("inside", "val loss"))
    assert last.startswith(f"a: {said}" if verdict else f"a: {NOT_COMPARABLE}: ") and said in last
    assert result.code == 0 and not (verdict and result.err)
    assert ("docs/first_hour.md" in last) == said.startswith("val loss")


def test_draws_the_band_and_the_difference_from_its_mean(band, tmp_path):
    """Draw the run's val losses and the band's low and high, all minus the band's mean."""
    from matplotlib.axes import Axes

    a = write_run(tmp_path / "a", {0: 8.0, 10: 4.05, 15: 3.8, 20: 3.4})
    fill = mock.patch.object(Axes, "fill_between", autospec=True, side_effect=Axes.fill_between)
    with fill as filled:
        lines = drawn(a, band, f"--png={tmp_path / 'both.png'}")
    at, difference = lines[3]
    assert [*at] == [10_000, 20_000] and [*difference] == pytest.approx([0.05, -0.1])
    _, at, low, high = filled.call_args.args
    assert [*at] == [10_000, 20_000, 30_000]
    assert [*low] == pytest.approx([-0.1, -0.05, -0.02])
    assert [*high] == pytest.approx([0.1, 0.05, 0.02])


# -----------------------------------------------------------------------------
# The picture


def drawn(*arguments) -> list[tuple]:
    """Return (x, y) of each line that compare.py draws."""
    from matplotlib.axes import Axes

    with mock.patch.object(Axes, "plot", autospec=True, side_effect=Axes.plot) as plot:
        assert run("compare.py", *arguments).code == 0
    return [call.args[1:3] for call in plot.call_args_list]


def test_draws_losses_over_tokens_and_time_the_speed_and_the_learning_rate(tmp_path):
    """
    Draw six lines for each run: train loss, its mean and val loss over tokens, val loss over
    minutes, speed, and learning rate. Say why losses do not compare.
    """
    from matplotlib.figure import Figure

    a = write_run(tmp_path / "a", {0: 8.0, 5: 4.0, 10: 3.0})
    others = dict(val_fingerprint="others")
    b = write_run(tmp_path / "b", {0: 8.0, 5: 3.0, 20: 2.0}, step_ms=200, start=others)
    with mock.patch.object(Figure, "suptitle") as title:
        lines = drawn(a, b, f"--png={tmp_path / 'ab.png'}")
    assert title.call_args.args[0].endswith("not comparable: different validation tokens")
    assert len(lines) == 2 * 6
    _, _, val, over_time, speed, rate = lines[:6]
    assert [*val[0]] == [5000, 10_000]
    assert [*val[1]] == [*over_time[1]] == [4.0, 3.0]
    # 5 iterations of 0.1 s and 2 evaluations; then 5 more, a checkpoint and an evaluation
    assert [*over_time[0]] == pytest.approx([4.5 / 60, 8 / 60])  # minutes
    assert [*speed[1]] == [10_000] * 10
    assert [*rate[1]] == [0.1] * 10


def test_draws_other_losses_among_the_losses_and_other_measures_on_their_own_axis(tmp_path):
    """Show a loss below the train and val losses too. test_hacking.py reads the table's row."""
    from matplotlib.figure import Figure

    from reports.picture import draw
    from reports.runs import open_run

    measures = dict(second_loss=1.0, choices=0.5)
    run_with = open_run(write_run(tmp_path / "a", {0: 8.0, 5: 4.0, 10: 3.0}, measures=measures))
    draw(figure := Figure(), [[run_with]])
    losses, *_, others = figure.axes
    assert losses.get_ylim()[0] < 1.0
    assert [*others.get_lines()[0].get_ydata()] == [0.5, 0.5]


def test_averages_other_measures_over_the_seeds_of_each_side(tmp_path):
    change = write_side(tmp_path, "idea", [2.0, 2.1], measures=dict(choices=0.5))
    base = write_side(tmp_path, "base", [2.0, 2.1], measures=dict(choices=0.25))
    result, _, _ = against(tmp_path, change, base)
    assert re.search(r"^last choices, mean +0\.5000 +0\.2500$", result.out, re.MULTILINE)


def test_smooths_the_train_loss_over_a_tenth_of_the_run_but_not_its_beginning(tmp_path):
    """
    Average 40 losses, 5, 3, 5, 3, ..., with up to two on either side: none for the first four, one
    for the next four. Of 19 losses, average none.
    """
    raw, mean, *_ = drawn(write_run(tmp_path / "a", {0: 8.0, 40: 4.0}))
    assert [*raw[1]] == [5, 3] * 20
    assert [*mean[0]] == [*raw[0]]
    assert [*mean[1][:6]] == pytest.approx([5, 3, 5, 3, 11 / 3, 13 / 3])
    assert mean[1][12] == pytest.approx((3 * 5 + 2 * 3) / 5)
    assert mean[1][39] == pytest.approx((2 * 3 + 5) / 3)
    raw, mean, *_ = drawn(write_run(tmp_path / "short", {0: 8.0, 19: 4.0}))
    assert [*mean[1]] == [*raw[1]] and len(raw[1]) == 19
    # a run with a single record, whose loss is NaN
    one = write_records(tmp_path / "one", dict(kind="step", iter=0, loss=math.nan))
    assert drawn(one) and (one / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_prints_the_table_without_matplotlib(tmp_path):
    """Say how to install matplotlib, and exit with code 2 only if --png asked for a picture."""
    a = write_run(tmp_path / "a", {0: 8.0, 5: 3.0})
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        result = run("compare.py", a)
        assert result.code == 0
        assert "best val loss" in result.out
        assert "pip install matplotlib" in result.err
        assert run("compare.py", a, "--png=a.pdf").err.startswith("error: png: a.pdf")
        asked_for = run("compare.py", a, f"--png={tmp_path / 'a.png'}")
        assert asked_for.code == 2
        assert "best val loss" in asked_for.out


@pytest.mark.parametrize("flag", ["--png=no/where.png", "--json=a"])
def test_an_unwritable_path_gives_one_error_line_after_the_table(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), {0: 8.0, 5: 3.0})
    before = sorted(tmp_path.rglob("*"))
    result = run("compare.py", "a", flag)
    assert "best val loss" in result.out
    (said,) = result.err.splitlines()
    assert result.code == 2 and said.startswith(f"error: {flag.partition('=')[2]}")
    assert sorted(tmp_path.rglob("*")) == before
