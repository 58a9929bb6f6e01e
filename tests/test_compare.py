"""
compare.py says what can be worked out by hand from the same records and logs, and its pictures
never stop a run.
"""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers import records, run_here, run_process, write_dataset

import compare
from reports import picture
from reports.runs import Run, open_run, read_run

NANOGPT_LOG = """\
Overriding config with config/train_4070.py:
# what was run on the card
out_dir = 'out-{n_embd}'
dataset = 'fineweb'
batch_size = {batch_size} # micro-batch
block_size = 1024
gradient_accumulation_steps = {accum}
n_layer = 12
n_head = 12
n_embd = {n_embd}
learning_rate = {lr}
eval_interval = 500
log_interval = 100

tokens per iteration will be: 524,288
Initializing a new model from scratch
defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)
number of parameters: {millions}M
compiling the model... (takes a ~minute)
step 0: train loss 10.9852, val loss 10.9861
iter 0: loss 10.9853, time 32145.33ms, mfu -100.00%
iter 100: loss 7.1003, time {early:.2f}ms, mfu {mfu:.2f}%
iter 200: loss 6.5101, time {late:.2f}ms, mfu {mfu:.2f}%
step 500: train loss 5.5101, val loss {val_500}
saving checkpoint to out-{n_embd}
iter 500: loss 5.5021, time {evaluated:.2f}ms, mfu {spoilt:.2f}%
iter 800: loss 4.8213, time {usual:.2f}ms, mfu {mfu:.2f}%
"""


def write_notes_logs(folder: Path) -> list[Path]:
    """
    The two runs of the users' note: 16 x 32 at n_embd 384, then 8 x 64 at 768, on an RTX 4070.
    """
    old = dict(batch_size=16, accum=32, n_embd=384, lr="1e-3", millions="40.56", val_500="5.5328")
    new = dict(batch_size=8, accum=64, n_embd=768, lr="3e-4", millions="123.59", val_500="5.5194")
    paths = []
    for name, usual, mfu, values in (("old", 3900, 12.93, old), ("new", 9340, 15.38, new)):
        times = dict(usual=usual, early=usual - 10, late=usual + 10, evaluated=usual + 20000)
        text = NANOGPT_LOG.format(mfu=mfu, spoilt=mfu - 1, **times, **values)
        paths.append(folder / f"{name}.log")
        paths[-1].write_text(text)
    return paths


def write_run(
    folder: Path,
    step_ms: float,
    val_losses: dict[int, float],
    tokens_per_iter: int = 1000,
    tokenizer: str | None = None,
    bits: float | None = None,
    **config,
) -> Path:
    """
    A finished run: a record for every iteration, evaluations of 2 s, a checkpoint of 1 s with each
    but the first. `bits`: the bits per byte of a loss of 1.
    """
    folder.mkdir()
    start = dict(
        kind="start",
        iter=0,
        config=dict(dataset="d", eval_tokens=4096, learning_rate=1e-3) | config,
        parameters=5000,
        device="card",
        dtype="bfloat16",
        flops_per_token=1000,
        tokens_per_iter=tokens_per_iter,
        tokenizer=tokenizer,
    )
    lines, hours = [start], 0.0
    speed = dict(step_ms=step_ms, tokens_per_sec=tokens_per_iter / step_ms * 1e3, mfu=0.5)
    for it in range(max(val_losses) + 1):
        so_far = dict(iter=it, tokens=it * tokens_per_iter)
        if it in val_losses:
            loss, hours = val_losses[it], hours + 2 / 3600
            losses = dict(train_loss=loss, val_loss=loss, bits_per_byte=bits and loss * bits)
            lines.append(so_far | dict(kind="eval", hours=hours) | losses)
        if it in val_losses and it > 0:
            lines.append(dict(kind="checkpoint", iter=it, path="x", bytes=1, seconds=1.0))
            hours += 1 / 3600
        if it < max(val_losses):
            hours += step_ms / 3.6e6
            lines.append(so_far | dict(kind="step", hours=hours, loss=4.0) | speed)
    lines.append(dict(kind="end", reason="max_iters", iters=it, tokens=it * tokens_per_iter))
    lines[-1] |= dict(hours=hours, ledger={})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def compare_runs(script, *arguments) -> dict:
    """The table that --json writes."""
    path = Path(arguments[0]).parent / "table.json"
    code, _, err = script(compare.main, *arguments, f"--json={path}")
    assert code == 0, err
    return json.loads(path.read_text())


def row(table: str, label: str) -> str:
    return next(line for line in table.splitlines() if line.startswith(label))


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def draw(out_dir: Path) -> None:
    picture.save_picture([read_run(out_dir / "metrics.jsonl")], out_dir / "loss.png")
    png_size(out_dir / "loss.png")


def test_the_notes_two_runs_give_speed_and_mfu_of_a_4070(tmp_path):
    old, new = write_notes_logs(tmp_path)
    outputs = (f"--json={tmp_path / 'table.json'}", f"--png={tmp_path / 'both.png'}")
    code, out, err = run_process("compare.py", str(old), str(new), "--gpu=4070", *outputs)
    assert code == 0, err
    table = json.loads((tmp_path / "table.json").read_text())
    for name, tokens_per_sec, mfu in (("old", 134_433, 0.692), ("new", 56_134, 0.823)):
        # by hand: 524288 / 3.9 s; 300.0 and 854.8 MFLOP/token over 58.3 TFLOP/s (the note said 12.9
        # % and 15.4 %)
        assert round(table["runs"][name]["tokens_per_sec"]) == tokens_per_sec
        assert round(table["runs"][name]["mfu"], 3) == mfu
    assert table["verdicts"]["tokens_per_sec"] == "old 2.39x faster"
    assert table["verdicts"]["val_loss_at_equal_iter"] == "new 0.0134 lower"
    batches = [table["runs"][name]["config/batch_size"] for name in ("old", "new")]
    assert batches == [16, 8]
    assert "134,433" in out and "56,134" in out and "69.2%" in out and "82.3%" in out
    assert min(png_size(tmp_path / "both.png")) > 400


def test_nanogpts_evaluations_do_not_count_as_iterations(tmp_path, script):
    old, _ = write_notes_logs(tmp_path)
    figures = compare_runs(script, old)["runs"]["old"]
    assert figures["step_ms_p95"] < 3911  # 23,900 and 32,145 are evaluation and compilation
    assert figures["hours"] == pytest.approx((20 + 801 * 3.9) / 3600, rel=1e-3)
    assert figures["mfu"] is None  # no card was named: nanoGPT's own figure is one of an A100
    assert figures["tokens"] == 801 * 524_288


def test_parameters_are_those_that_nanogpt_counted(tmp_path, script):
    log = write_notes_logs(tmp_path)[0]
    counts = ["num decayed parameter tensors: 14, with 155,712 parameters"]
    counts += ["num non-decayed parameter tensors: 7, with 448 parameters", "step 0:"]
    text = log.read_text().replace("parameters: 40.56M", "parameters: 0.15M")
    log.write_text(text.replace("step 0:", "\n".join(counts), 1))
    run = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0})
    text = (run / "metrics.jsonl").read_text().replace('"parameters": 5000', '"parameters": 160192')
    (run / "metrics.jsonl").write_text(text)
    _, out, _ = script(compare.main, log, run)
    assert row(out, "parameters").endswith("a 1.03x larger")  # 156,160 and 160,192


def test_mfu_of_a_run_on_eight_cards_is_that_of_one(tmp_path, script):
    # 16 % of an A100's peak on one card: the same speed from eight is 2 % each
    log = write_notes_logs(tmp_path)[1]
    text = log.read_text().replace("mfu 15.38%", "mfu 1.92%").replace("mfu 14.38%", "mfu 1.80%")
    log.write_text(text)
    figures = compare_runs(script, log, "--gpu=A100")["runs"]["new"]
    assert figures["mfu"] == pytest.approx(56_133.6 * 854.8e6 / 312e12 / 8, rel=1e-3)


def test_a_config_value_that_is_no_literal_is_n_a_and_said(tmp_path, script):
    """Here the default would be 12 layers, and an MFU of them."""
    log = write_notes_logs(tmp_path)[0]
    text = log.read_text().replace("n_layer = 12", "layers = 6\nn_layer = layers")
    log.write_text(
        text.replace("out_dir = ", "wandb_run_name = 'x-' + str(time.time())\nout_dir = ")
    )
    run = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0}, n_layer=6, n_head=6)
    code, out, err = script(compare.main, log, run, "--gpu=4070")
    assert code == 0
    said = f"warning: {log}: no plain value in n_layer = layers; what depends on it is n/a"
    assert said in err
    assert "n_layer" not in out  # one value is known, so nothing is known to differ
    assert row(out, "n_head").split() == ["n_head", "12", "6", "differs"]
    assert row(out, "MFU").split() == ["MFU", "n/a", "50.0%"]
    assert row(out, "parameters").split()[:2] == ["parameters", "40.95M"]  # as it printed them
    # a flag gives the value
    log.write_text(f"{log.read_text()}Overriding: n_layer = 12\n")
    code, out, err = script(compare.main, log, run, "--gpu=4070")
    assert row(out, "n_layer").split() == ["n_layer", "12", "6", "differs"]
    assert row(out, "MFU").split()[:2] == ["MFU", "69.2%"] and said not in err


@pytest.mark.parametrize(
    "line",
    [
        "n_layer, n_head = 6, 6",
        "if small:\n    n_layer = 6",
        "n_head = n_layer = 6",
        "n_layer += 2",
        "n_layer: int = 6",
        "a = 1; n_layer = 6",
    ],
)
def test_a_setting_in_any_form_is_not_taken_for_the_default(line, tmp_path, script):
    log = write_notes_logs(tmp_path)[0]
    log.write_text(log.read_text().replace("n_layer = 12", line))
    run = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0}, n_layer=6, n_head=6)
    code, out, err = script(compare.main, log, run, "--gpu=4070")
    assert code == 0 and "no plain value in " in err[0] and line.splitlines()[-1].strip() in err[0]
    assert row(out, "MFU").split() == ["MFU", "n/a", "50.0%"] and "n_layer" not in out


@pytest.mark.parametrize(
    "line", ["device = 'cuda' if torch.cuda.is_available() else 'cpu'", "dtype = best_dtype()"]
)
def test_a_card_that_the_log_does_not_tell_has_no_mfu(line, tmp_path, script):
    log = write_notes_logs(tmp_path)[0]
    log.write_text(log.read_text().replace("n_layer = 12", f"{line}\nn_layer = 12"))
    figures = compare_runs(script, log, "--gpu=4070")["runs"]["old"]
    assert (figures["dtype"], figures["mfu"]) == (None, None)


@pytest.mark.parametrize(
    "iterations, ours, flag",
    [
        (200, dict(pad_vocab_multiple=128), "--pad_vocab_multiple=1"),
        (200, dict(pad_vocab_multiple=1), None),
        (400, dict(pad_vocab_multiple=128), None),
    ],
)
def test_padding_which_moves_a_short_runs_loss_is_said_with_the_flag_that_makes_it_equal(
    iterations, ours, flag, tmp_path, script
):
    log = write_notes_logs(tmp_path)[0]
    beginning = "Overriding: device = cpu\nfound vocab_size = 65 (inside data/meta.pkl)\n"
    log.write_text(beginning + log.read_text())
    losses = {0: 8.0, iterations: 3.0}
    run = write_run(tmp_path / "a", 10, losses, dataset="fineweb", model="gpt2", **ours)
    _, _, err = script(compare.main, log, run)
    found = [line for line in err if "short run" in line]
    assert len(found) == bool(flag) and all(line.endswith(f"only with {flag}") for line in found)


def test_powershells_utf_16_and_a_pattern_are_read(tmp_path, script):
    for log in write_notes_logs(tmp_path):
        log.write_text(log.read_text(), encoding="utf-16", newline="\r\n")
    figures = compare_runs(script, tmp_path / "*.log", "--gpu=4070")["runs"]
    assert round(figures["old"]["tokens_per_sec"]) == 134_433 and "new" in figures


def test_a_log_of_the_cpu_is_not_given_a_cards_name_and_peak(tmp_path, script):
    log = write_notes_logs(tmp_path)[0]
    log.write_text(f"Overriding: device = cpu\n{log.read_text()}")
    figures = compare_runs(script, log, "--gpu=4070")["runs"]["old"]
    # nanoGPT uses autocast on CUDA only
    assert (figures["device"], figures["dtype"], figures["mfu"]) == ("cpu", "float32", None)


def test_a_card_whose_peak_is_not_certain_gives_no_mfu(tmp_path, script):
    log = write_notes_logs(tmp_path)[0]
    code, _, err = script(compare.main, log, "--gpu=RTX 2070 SUPER")  # it has no bfloat16
    assert code == 2 and "the bfloat16 peak of RTX 2070 SUPER is not certain" in err[0]


def test_two_runs_at_equal_iterations_tokens_and_hours(tmp_path, script):
    a = write_run(tmp_path / "a", 36_000, {0: 8.0, 50: 4.0, 90: 3.2, 100: 3.0}, learning_rate=1e-3)
    losses = {0: 8.0, 40: 4.0, 46: 3.8, 54: 3.4, 95: 2.5}
    b = write_run(tmp_path / "b", 72_000, losses, tokens_per_iter=2000, learning_rate=2e-3)
    table = compare_runs(script, a, b, "--loss=4")
    of_a, of_b, verdicts = table["runs"]["a"], table["runs"]["b"], table["verdicts"]
    assert (of_a["config/learning_rate"], of_b["config/learning_rate"]) == (1e-3, 2e-3)
    assert (of_a["tokens"], of_b["tokens"]) == (100_000, 190_000)
    # 100 iterations of 36 s, 4 evaluations of 2 s, 3 checkpoints of 1 s
    assert of_a["hours"] == pytest.approx((3600 + 8 + 3) / 3600)
    # no iteration after 0 is evaluated in both: at 95, a is half-way from 3.2 to 3.0
    assert of_a["val_loss_at_equal_iter"] == pytest.approx(3.1)
    assert of_b["val_loss_at_equal_iter"] == 2.5
    assert verdicts["val_loss_at_equal_iter"] == "b 0.6000 lower"
    # 100,000 tokens are b's iteration 50: half-way from 3.8 to 3.4
    assert of_a["val_loss_at_equal_tokens"] == 3.0
    assert of_b["val_loss_at_equal_tokens"] == pytest.approx(3.6)
    # a's last evaluation ends after 3600 + 8 + 2 s; b's third and fourth after 3312 + 6 + 1 s and
    # 3888 + 8 + 2 s
    between = (3610 - 3319) / (3898 - 3319)
    assert of_b["val_loss_at_equal_hours"] == pytest.approx(3.8 - 0.4 * between)
    assert (of_a["tokens_to_loss"], of_b["tokens_to_loss"]) == (50_000, 80_000)
    assert of_a["hours_to_loss"] == pytest.approx(1804 / 3600)
    assert of_b["hours_to_loss"] == pytest.approx(2884 / 3600)
    assert "step_ms_p50" not in verdicts  # 36 and 72 ms of unequal tokens
    assert verdicts["tokens_to_loss"] == "a 1.60x less"


@pytest.mark.parametrize(
    "one, other",
    # the quickstart, and the same one ended after 300 iterations; then others
    [((100, 300), (500, 1500)), ((70, 1400), (400, 1600)), ((30, 600), (41, 1025))],
)
def test_equal_runs_with_other_evaluations_are_never_told_apart(tmp_path, script, one, other):
    """The loss falls from 5.4 to 2.0 within 300 iterations: a straight line is off by 1.2."""
    runs = []
    for name, (interval, last) in (("one", one), ("other", other)):
        losses = {it: 1.2 + 4.2 / (1 + it / 40) ** 0.8 for it in range(0, last + 1, interval)}
        runs.append(write_run(tmp_path / name, 100, losses))
    table = compare_runs(script, *runs)
    for axis in ("iter", "tokens"):
        losses = [run.get(f"val_loss_at_equal_{axis}") for run in table["runs"].values()]
        if None not in losses:
            assert max(losses) - min(losses) < 0.01
        assert table["verdicts"].get(f"val_loss_at_equal_{axis}", "equal").startswith("equal")
    # the losses that both reached, and some that both reached on the way
    for more in ([], ["--loss=1.8"], ["--loss=1.6"]):
        verdicts = compare_runs(script, *runs, *more)["verdicts"]
        assert verdicts.get("tokens_to_loss", "equal").startswith("equal")


def test_a_loss_is_not_read_off_a_line_from_iteration_0(tmp_path):
    run = compare.open_run(write_run(tmp_path / "a", 100, {0: 5.4, 500: 1.9, 550: 1.8}), None)
    curve = compare.learning_curve(run, "iter")
    assert [compare.loss_at(*curve, at) for at in (300, 500, 600)] == [None, 1.9, None]
    assert compare.loss_at(*curve, 525) == pytest.approx(1.85)
    assert compare.reach(*curve, 2.0) is None
    assert compare.reach(*curve, 1.9) == 500
    assert compare.reach(*curve, 1.85) == pytest.approx(525)


def test_the_table_says_dtype_once_and_minutes(tmp_path, script):
    runs = []
    for name, dtype in (("a", "bfloat16"), ("b", "float32")):
        runs.append(write_run(tmp_path / name, 1000, {0: 8.0, 200: 3.0}, dtype=dtype))
    _, out, _ = script(compare.main, *runs)
    assert [line.split()[0] for line in out.splitlines()].count("dtype") == 1
    assert row(out, "time ").split() == ["time", "3m25s", "3m25s", "equal"]


def test_tokens_of_a_killed_run_of_an_earlier_version(dataset, tmp_path):
    """Its steps say how many came before them, and no more."""
    assert run_here(dataset, tmp_path, max_iters=5, eval_interval=2) == 0
    kept = [r for r in records(tmp_path) if r["kind"] != "end" and r["iter"] < 4]
    whole = Run("now", kept)
    for record in kept:
        record.pop("tokens_after", None)
    assert whole.tokens == Run("before", kept).tokens == 4 * 128


def test_a_real_run_read_back_and_drawn(dataset, tmp_path):
    out_dir = tmp_path / "run"
    assert run_here(dataset, out_dir, max_iters=12, eval_interval=5, log_interval=3) == 0
    assert not (out_dir / "loss.png").exists()  # of a run so short
    code, _, err = run_process("compare.py", str(out_dir), f"--json={tmp_path / 'table.json'}")
    assert code == 0, err
    assert min(png_size(out_dir / "loss.png")) > 400
    figures = json.loads((tmp_path / "table.json").read_text())["runs"]["run"]
    speeds = [record["tokens_per_sec"] for record in records(out_dir, "step")]
    assert figures["iterations"] == 12 and figures["tokens"] == 12 * 128
    assert figures["tokens_per_sec"] == pytest.approx(np.median(speeds))
    (end,) = records(out_dir, "end")
    in_run = sum(end["ledger"][name] for name in ("steps", "evaluation", "checkpoints"))
    assert figures["hours"] == pytest.approx(in_run / 3600, rel=1e-2)
    losses = [record["val_loss"] for record in records(out_dir, "eval")]
    assert figures["best_val_loss"] == min(losses)


def test_losses_on_unequal_datasets_are_not_compared(tmp_path, script):
    a = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0})
    b = write_run(tmp_path / "b", 10, {0: 8.0, 5: 2.0}, dataset="other", eval_tokens=8192)
    _, out, err = script(compare.main, a, b)
    assert row(out, "eval_tokens").split() == ["eval_tokens", "4096", "8192", "differs"]
    assert row(out, "dataset").split() == ["dataset", "d", "other", "differs"]
    for label in ("best val loss", "val loss at", "tokens to val loss"):
        assert row(out, label).endswith("  not comparable")
    assert err == ["warning: losses are not comparable: unequal datasets"]


def test_a_key_that_came_after_a_run_has_its_default_there(tmp_path, script):
    a = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0})
    b = write_run(tmp_path / "b", 10, {0: 8.0, 5: 2.0}, dropout=0.1)
    _, out, _ = script(compare.main, a, b)
    assert row(out, "dropout").split() == ["dropout", "0.0", "0.1", "differs"]
    theirs = tmp_path / "nanogpt.log"
    theirs.write_text("step 0: train loss 8.0, val loss 8.0\niter 0: loss 8.0, time 5.00ms\n")
    _, out, _ = script(compare.main, b, theirs)
    assert "dropout" not in out and "bias" not in out  # nobody knows


# settings of two runs, one of which reads 4,096 tokens of each split in an evaluation
@pytest.mark.parametrize(
    "other, verdict, said",
    [
        (dict(batch_size=4, eval_iters=2), "a 1.0000 lower", []),
        (
            dict(batch_size=4),
            "  not comparable",
            ["warning: losses are not comparable: unequal tokens evaluated"],
        ),
    ],
)
def test_losses_on_unequal_numbers_of_tokens_are_not_compared(
    tmp_path, script, other, verdict, said
):
    sizes = dict(eval_tokens=0, eval_iters=1, batch_size=8, block_size=512)
    a = write_run(tmp_path / "a", 10, {0: 8.0, 5: 2.0}, **sizes)
    b = write_run(tmp_path / "b", 10, {0: 8.0, 5: 3.0}, **sizes | other)
    _, out, err = script(compare.main, a, b)
    assert row(out, "val loss at iteration").endswith(verdict) and err == said


def test_a_dataset_given_by_its_path_is_the_same_dataset(tmp_path, script):
    """As nanoGPT's log has it, and a run here on nanoGPT's own folder."""
    a = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0}, dataset="shakespeare_char")
    path = "../nanoGPT/data/shakespeare_char"
    b = write_run(tmp_path / "b", 10, {0: 8.0, 5: 2.0}, dataset=path)
    _, out, _ = script(compare.main, a, b)
    assert row(out, "best val loss").endswith("b 1.0000 lower")


def test_a_copy_of_a_dataset_is_the_same_dataset(dataset, tmp_path, script):
    """By its fingerprint, whatever the folders are called."""
    copy = shutil.copytree(dataset, tmp_path / "copy")
    other = write_dataset(tmp_path / "other", [900, 300])
    for name, data in (("a", dataset), ("b", copy), ("c", other)):
        assert run_here(data, tmp_path / name, max_iters=4) == 0
    a, b, c = (tmp_path / name for name in "abc")
    _, out, _ = script(compare.main, a, b)
    assert "dataset" not in out and row(out, "best val loss").endswith("equal within 0.005")
    _, out, _ = script(compare.main, a, c)
    assert row(out, "dataset").split() == ["dataset", dataset.name, "other", "differs"]


def test_runs_of_unequal_tokenizers_are_compared_by_bits_per_byte(tmp_path, script):
    """A token of GPT-2's is some four bytes: its loss in nats is always the higher one."""
    gpt2, own = dict(tokenizer="gpt2", bits=0.25), dict(tokenizer=f"bpe {'1a2b' * 16}", bits=0.5)
    a = write_run(tmp_path / "a", 36_000, {0: 8.0, 5: 4.0, 10: 3.2}, dataset="x", **gpt2)
    b = write_run(tmp_path / "b", 36_000, {0: 6.0, 5: 2.5, 10: 2.0}, dataset="y", **own)
    code, out, err = script(compare.main, a, b, f"--json={tmp_path / 'table.json'}")
    assert code == 0 and len(err) == 1  # the first reason, once
    assert err[0].endswith("comparable: unequal tokenizers; bits per byte are, on the same text")
    best = row(out, "best bits per byte")
    assert best.split()[4:] == ["0.8000", "1.0000", "a", "0.2000", "lower"]
    for label in ("best val loss", "val loss at iteration 10", "tokens to val", "time to val"):
        assert row(out, label).endswith("  not comparable")
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["runs"]["a"]["best_bits_per_byte"] == pytest.approx(0.8)
    assert table["verdicts"]["best_bits_per_byte"] == "a 0.2000 lower"


@pytest.mark.parametrize("known", [0.25, None])
def test_unequal_tokenizers_without_bits_per_byte_are_not_ranked(known, tmp_path, script):
    a = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0}, tokenizer="gpt2", bits=known)
    b = write_run(tmp_path / "b", 10, {0: 6.0, 5: 1.0}, tokenizer="byte")
    code, out, err = script(compare.main, a, b)
    assert code == 0 and len(err) == 1 and "unequal tokenizers" in err[0]
    if known:
        assert row(out, "best bits per byte").split()[4:] == ["0.7500", "n/a"]
    assert "lower" not in out and "less" not in out


@pytest.mark.parametrize(
    "tokenizer, label, loss, bits, noise",
    [("gpt2", "best val loss", 4.002, 0.25, 0.005)]
    + [("byte", "best bits per byte", 1.0, 1.0016, 0.002)],
)
def test_a_difference_within_seed_noise_decides_nothing(
    tokenizer, label, loss, bits, noise, tmp_path, script
):
    """0.005 nats of a token of 4.5 bytes are 0.0016 bits per byte."""
    a = write_run(tmp_path / "a", 10, {0: 8.0, 5: 4.0}, tokenizer="gpt2", bits=0.25)
    b = write_run(tmp_path / "b", 10, {0: 6.0, 5: loss}, tokenizer=tokenizer, bits=bits)
    _, out, _ = script(compare.main, a, b)
    assert row(out, label).endswith(f"equal within {noise}")


@pytest.mark.parametrize("other", ["gpt2", "unknown", None])
def test_runs_not_known_to_have_unequal_tokenizers_are_compared_by_val_loss(
    other, tmp_path, script
):
    """Equal tokenizers, and runs that are older than the record of it."""
    a = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0}, tokenizer="gpt2", bits=0.25)
    b = write_run(tmp_path / "b", 10, {0: 8.0, 5: 3.2}, tokenizer=other, bits=0.3)
    code, out, err = script(compare.main, a, b)
    assert (code, err) == (0, [])
    assert row(out, "best val loss").endswith("a 0.2000 lower")
    # a second verdict, with another threshold, could say otherwise
    assert row(out, "best bits per byte").split()[4:] == ["0.7500", "0.9600"]


def test_runs_without_the_hours_of_their_evaluations_say_so_and_are_n_a_there(tmp_path, script):
    """As an older version wrote them."""
    run, other = (write_run(tmp_path / name, 10, {0: 8.0, 5: 4.0, 10: 3.0}) for name in "ab")
    lines = []
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        line.pop("hours", None)
        if line["kind"] == "eval":
            del line["tokens"]
        lines.append(json.dumps(line))
    (run / "metrics.jsonl").write_text("\n".join(lines))
    code, out, err = script(compare.main, run, other)
    assert code == 0 and len(err) == 1 and err[0].startswith("warning: a: an older version did not")
    assert row(out, "time ").split()[:2] == ["time", "n/a"]
    assert row(out, "tokens to val loss").split()[5] == "n/a"
    assert row(out, "iterations").split() == ["iterations", "10", "10", "equal"]
    assert row(out, "tokens ").split() == ["tokens", "10k", "10k", "equal"]
    assert row(out, "val loss at iteration 10").endswith("equal within 0.005")
    assert "val loss after" not in out and "val loss at 10" not in out


def test_a_killed_runs_torn_last_line_is_left_out(tmp_path, script):
    run = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0})
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "iter": 99, "tok')
    code, out, err = script(compare.main, run)
    assert (code, err) == (0, [])
    assert row(out, "iterations").split() == ["iterations", "5"]


def test_bad_input_is_one_line_each_and_exit_2(tmp_path, script):
    empty, wrong = tmp_path / "empty", tmp_path / "wrong.log"
    empty.mkdir()
    wrong.write_text("hello\n")
    own = tmp_path / "own.log"
    own.write_text("iter 100: loss 5.1234, time 168.20ms, mfu 41.20%, tok/s 134,433, lr 6.00e-04\n")
    run = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0})
    (log,) = write_notes_logs(tmp_path)[:1]
    for arguments, word in (
        ([empty], f"{empty / 'metrics.jsonl'}: "),
        ([run, tmp_path / "nowhere"], "nowhere: No such file or directory; give the out_dir"),
        ([wrong], f"{wrong}: no iteration"),
        ([own], "give the run's out_dir"),
        ([log, "--gpu=4711"], "4711"),
        ([log, "--gpu=3080"], "10GB"),  # two cards of that name
        ([run, f"--png={tmp_path / 'no' / 'where.png'}"], "where"),
        ([run, f"--json={empty}"], "empty"),
    ):
        code, _, err = script(compare.main, *arguments)
        assert code == 2 and len(err) == 1 and word in err[0], err
    assert script(compare.main)[0] == 2
    assert script(compare.main, run, "--pgn=x")[0] == 2


def test_a_log_without_its_tokens_per_iteration_says_what_to_add(tmp_path, script):
    log = tmp_path / "cut.log"
    lines = (
        "iter 100: loss 7.1003, time 3900.00ms, mfu 12.93%",
        "step 200: train loss 5, val loss 6",
    )
    log.write_text("\n".join(lines))
    code, out, err = script(compare.main, log)
    assert code == 0 and len(err) == 1 and "tokens per iteration will be" in err[0]
    assert row(out, "tok/s").split() == ["tok/s", "n/a"]


def test_the_picture_of_a_long_run_has_means_of_its_steps_and_all_evaluations(tmp_path):
    from matplotlib.figure import Figure

    path = write_run(tmp_path / "a", 10, {it: 3.0 for it in range(0, 13_001, 5)}) / "metrics.jsonl"
    figure = Figure()
    picture.draw(figure, [read_run(path)])
    train_line, val_line = figure.axes[0].lines
    assert 300 < len(train_line.get_xdata()) <= picture.PICTURE_POINTS
    assert len(val_line.get_xdata()) == 13_000 / 5


DAMAGED_LINES = """\
{"kind": "step", "iter"
[1]
\0\N{REPLACEMENT CHARACTER}
{"kind": "start", "iter": 0, "config": {"dataset": "d", "old_key": 1}}
{"kind": "step", "iter": 0, "tokens": 0, "loss": NaN, "step_ms": null, "mfu": null}
{"kind": "eval", "iter": 9, "val_loss": null}
"""


def test_lines_that_are_no_records_are_passed_over(tmp_path, script, capsys):
    run = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0})
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(DAMAGED_LINES)
    draw(run)
    assert capsys.readouterr().err == ""
    assert compare_runs(script, run)["runs"]["a"]["best_val_loss"] == 3.0


@pytest.mark.parametrize("content", ["", "{", '{"kind": "eval", "iter": 0, "val_loss": 3}'])
def test_a_run_that_has_hardly_begun_has_a_picture(tmp_path, content, capsys):
    (tmp_path / "metrics.jsonl").write_text(content)
    draw(tmp_path)
    assert capsys.readouterr().err == ""


def test_a_folder_given_for_the_picture_is_one_line(tmp_path, script, monkeypatch):
    run = write_run(tmp_path / "a", 10, {0: 8.0, 5: 3.0})
    monkeypatch.chdir(tmp_path)
    for folder in (".", "a"):
        code, _, err = script(compare.main, run, f"--png={folder}")
        assert code == 2 and err == [f"error: {folder}: is a folder; give a file in it"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_a_run_of_less_than_a_second_is_not_shown_as_none():
    shown = [compare.time_text(seconds / 3600) for seconds in (0.0042, 0.42, 4.2, 42, 4200)]
    assert shown == ["0.0042s", "0.42s", "4.2s", "42s", "1h10m"]


def write_records(folder: Path, iters: list[int], end: int | None = None) -> Path:
    """A run of 100 ms an iteration with log lines at these, its loss falling from 10 to 9."""
    folder.mkdir()
    lines = [dict(kind="start", iter=0, config={}, parameters=828_500, tokens_per_iter=1000)]
    for it in iters:
        speed = dict(step_ms=100.0, tokens_per_sec=10_000, hours=(it + 1) * 0.1 / 3600)
        loss = 9 + 1 / (1 + it)
        lines.append(dict(kind="step", iter=it, tokens=it * 1000, loss=loss) | speed)
    if end:
        lines.append(dict(kind="end", reason="SIGTERM", iters=end, tokens=end * 1000, ledger={}))
        lines[-1]["hours"] = end * 0.1 / 3600
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_resumed_with_other_keys_says_which(tmp_path, script):
    run = write_records(tmp_path / "a", [0, 25])
    first, rest = (run / "metrics.jsonl").read_text().split("\n", 1)
    # a name that holds the time of day, as in nanoGPT's config files, is no change
    configs = [
        dict(max_iters=30, n_head=2, init_from="gpt2", wandb_run_name="mini-1"),
        dict(max_iters=60, n_head=2, init_from="resume", wandb_run_name="mini-2"),
    ]
    starts = [json.loads(first) | dict(config=config) for config in configs]
    lines = [*map(json.dumps, starts), rest]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    said = compare_runs(script, run)["warnings"]
    assert said == ["a: resumed with other max_iters; shown as of the last launch"]
    assert open_run(run).config["init_from"] == "gpt2"


def test_a_stop_between_two_log_lines_loses_no_iteration(tmp_path, script):
    """The last log line of both is that of iteration 25; the end record says where they ended."""
    a = write_records(tmp_path / "a", [0, 25], end=41)
    b = write_records(tmp_path / "b", [0, 25], end=44)
    table = compare_runs(script, a, b)
    for run, iterations in (("a", 41), ("b", 44)):
        figures = table["runs"][run]
        assert (figures["iterations"], figures["tokens"]) == (iterations, iterations * 1000)
        assert figures["hours"] == pytest.approx(iterations * 0.1 / 3600)
    assert table["verdicts"]["iterations"] == "b 1.07x more"
    assert "ended after 41 iterations" in picture.heading(open_run(a))


def test_padding_that_nanogpts_log_does_not_tell_is_not_made_up(tmp_path, script):
    runs = [write_run(tmp_path / str(n), 10, {0: 8.0}, pad_vocab_multiple=n) for n in (1, 64)]
    log = write_notes_logs(tmp_path)[0]
    _, out, _ = script(compare.main, log, *runs)
    assert row(out, "pad_vocab_multiple").split() == "pad_vocab_multiple n/a 1 64 differs".split()
    assert "pad_vocab_multiple" not in script(compare.main, log, runs[0])[1]


def test_one_iteration_more_of_200_is_equal(tmp_path, script):
    """nanoGPT makes one more than max_iters."""
    runs = [write_records(tmp_path / str(n), list(range(n))) for n in (200, 201)]
    assert compare_runs(script, *runs)["verdicts"]["iterations"] == "equal"


def test_three_runs_are_equal_only_if_all_are():
    def verdict(values: list, word: str = "faster", same: float = compare.SAME) -> str:
        return compare.Row("", "", values, str, word, same).verdict(["a", "b", "c"])

    assert verdict([100, 100, 100]) == "equal" and verdict([100, 100, 50]) == ""
    assert verdict([100, 80, 50]) == "a 1.25x faster"
    losses = dict(word="lower", same=0.005)
    assert verdict([1.0, 1.001, 1.002], **losses) == "equal within 0.005"
    assert verdict([1.0, 1.001, 2.0], **losses) == ""
