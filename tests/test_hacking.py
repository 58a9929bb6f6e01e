"""docs/hacking.md: its diffs fit the code as it is, and what they change is alive."""

import math
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import TINY
from pages import code_blocks
from program import ROOT, checkpoint, column, finish, flags, same, start, write_tokens
from program import run as run_here

pytestmark = pytest.mark.upstream  # a fork that has taken a diff cannot take it again
PAGE = ROOT / "docs" / "hacking.md"
NAMES = ("key", "mixture", "documents", "optimizer", "loss", "average", "figure", "schedule")
DIFFS = dict(zip(NAMES, code_blocks(PAGE, "diff"), strict=True))
LION = dict(optimizer="lion", learning_rate=1e-3)
SCHEDULE = dict(lr_schedule="wsd", decay_fraction=0.5)
RATES = [0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.01]  # two of warm-up, then the highest up to iteration 4
RATES += [6e-5 + (0.01 - 6e-5) * (1 - math.sqrt(share)) for share in (0.25, 0.5, 0.75)]


# the z-loss of an untrained model, which has all of 128 ids for about as likely
AT_FIRST = 1e-4 * math.log(128) ** 2


def files_of(diff: str) -> list[str]:
    return re.findall(r"^--- a/(.*)$", diff, re.MULTILINE)


def apply(diff: str, folder: Path, *options: str) -> None:
    # in a repository above the folder git would look for other paths
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    command = ["git", "apply", *options, "-"]
    subprocess.run(command, input=diff, text=True, cwd=folder, env=environment, check=True)


def copy_program(folder: Path, *names: str) -> Path:
    """The tracked program, with the named diffs."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs git and a checkout")
    for name in listed.stdout.splitlines():
        if not name.startswith(("tests/", "results/", "docs/")):
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    for name in names:
        apply(DIFFS[name], folder)
    return folder


def run(folder: Path, *words) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a script of the copy."""
    return finish(start(*map(str, words), cwd=folder, only_torch=True), timeout=300)


@pytest.fixture
def tiny(tmp_path):
    """tiny(out_dir, **changes) -> the flags of a run of some seconds."""
    dataset = write_tokens(tmp_path / "tokens", [1000, 500], [700], vocab=64)

    def tiny(out_dir: Path, **changes) -> list[str]:
        return flags(**TINY | dict(dataset=dataset, out_dir=out_dir) | changes)

    return tiny


@pytest.fixture
def train(tiny):
    """train(folder, out, **changes) -> stdout of the copy's train.py, which has succeeded."""

    def train(folder: Path, out: str, **changes) -> str:
        code, stdout, err = run(folder, "train.py", *tiny(folder / out, **changes))
        assert code == 0, err
        return stdout

    return train


@pytest.fixture
def stock(tiny, tmp_path):
    """stock(**changes) -> the unchanged program's out_dir, trained for as long."""

    def train(**changes) -> Path:
        out_dir = tmp_path / f"stock{len(list(tmp_path.glob('stock*')))}"
        result = run_here("train.py", *tiny(out_dir, **changes))
        assert result.code == 0, result.err
        return out_dir

    return train


def assert_same_state(a: dict, b: dict) -> None:
    for key in ("model", "rng", "progress"):
        assert same(a[key], b[key]), key
    assert same(a["optimizer"]["state"], b["optimizer"]["state"])


def weights(out_dir: Path, iter_num: int = TINY["max_iters"]) -> torch.Tensor:
    return torch.cat([w.flatten() for w in checkpoint(out_dir, iter_num)["model"].values()])


def first(out_dir: Path, kind: str, name: str):
    return column(out_dir, kind, name)[0]


# -----------------------------------------------------------------------------
# The page


@pytest.mark.parametrize("name", DIFFS)
def test_a_diff_of_the_page_fits_and_can_be_undone(name, tmp_path):
    diff = DIFFS[name]
    before = {file: (ROOT / file).read_text() for file in files_of(diff)}
    for file, text in before.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    apply(diff, tmp_path)
    assert all((tmp_path / file).read_text() != text for file, text in before.items())
    apply(diff, tmp_path, "-R")
    assert all((tmp_path / file).read_text() == text for file, text in before.items())


def test_the_diffs_of_the_page_go_together(tmp_path):
    copy_program(tmp_path, *DIFFS)


# -----------------------------------------------------------------------------
# The experiments


@pytest.mark.slow
def test_the_key_changes_the_model_and_nobody_takes_it_for_another(tiny, tmp_path, train, stock):
    folder = copy_program(tmp_path / "copy", "key")
    stdout = train(folder, "run", mlp="swiglu")
    gate = checkpoint(folder / "run", 8)["model"]["transformer.h.0.mlp.c_gate.weight"]
    assert gate.shape == (8 * 32 // 3, 32)
    parameters = 128 * 32 + 16 * 32 + 2 * (4 * 32**2 + 3 * 85 * 32 + 2 * 32) + 32
    assert f"model: {parameters / 1e6:.2f}M parameters" in stdout
    # no products: positions, and the weights of five norms
    flops = 6 * (parameters - 16 * 32 - 5 * 32) + 12 * 2 * 32 * 16
    assert f"{flops / 1e6:.1f} MFLOP/token" in stdout
    train(folder, "default")
    assert_same_state(checkpoint(folder / "default", 8), checkpoint(stock(), 8))
    train(folder, "run", mlp="swiglu", init_from="resume", max_iters=10)
    assert run(folder, "sample.py", "--out_dir=run", "--device=cpu", "--num_samples=1")[0] == 0

    refused = {
        "mlp: only model=gpt2 reads it": tiny(folder / "fast", mlp="swiglu", model="fast"),
        "mlp 'swiglu' (asked for: 'gelu')": tiny(folder / "run", mlp="gelu", init_from="resume"),
        "transformers has no class for that": ["ckpt-to-hf", folder / "run", folder / "hf"],
    }
    for words, arguments in refused.items():
        script = "convert.py" if arguments[0] == "ckpt-to-hf" else "train.py"
        code, _, err = run(folder, script, *arguments)
        assert code == 2 and words in err, err
    code, plan, _ = run(folder, "bench.py", "plan", "--gpu=4070", "--mlp=swiglu")
    assert code == 0, plan


@pytest.fixture
def resumes(train):
    """resumes(folder, **changes) -> the last checkpoint; eight iterations, and four and four."""

    def check(folder: Path, **changes) -> dict:
        changes |= dict(dropout=0.1)
        train(folder, "straight", **changes)
        train(folder, "halves", **changes, lr_decay_iters=8, max_iters=4)
        train(folder, "halves", **changes, lr_decay_iters=8, init_from="resume")
        straight = checkpoint(folder / "straight", 8)
        assert_same_state(straight, checkpoint(folder / "halves", 8))
        return straight

    return check


# In the copy: logits through the caches, one token after another, against a full forward pass.
SAMPLED_RIGHT = """
import sys, torch
from model import KVCache
from model_fast import build_model, config_from_dict
state = torch.load(sys.argv[1], weights_only=True)
model = build_model(config_from_dict(state["model_config"])).eval()
model.load_state_dict(state["model"])
torch.manual_seed(0)
idx = torch.randint(20, (2, 16))
idx[0, [0, 5]] = idx[1, 9] = 0  # documents
expected = model(idx)
caches = [KVCache(16) for _ in model.transformer.h]
for n in range(16):
    new = model.logits(model.hidden(idx[:, : n + 1], caches)[:, -1])
    torch.testing.assert_close(new, expected[:, n], atol=1e-4, rtol=1e-4)
"""


def assert_sampled_right(folder: Path, out: str) -> None:
    code, _, err = run(folder, "-c", SAMPLED_RIGHT, folder / out / "ckpt-00000008.pt")
    assert code == 0, err


@pytest.mark.slow
def test_the_mixture_counts_no_flops_and_resumes(tiny, tmp_path, train, resumes):
    folder = copy_program(tmp_path / "copy", "mixture")
    state = resumes(folder, experts=4)
    assert state["model"]["transformer.h.1.mlp.router.weight"].shape == (4, 32)
    assert_sampled_right(folder, "straight")
    assert first(folder / "straight", "start", "flops_per_token") is None
    # a loss weight may be changed, the number of experts not; and Muon asks the router
    more = dict(experts=4, balance=0.1, optimizer="muon", learning_rate=0.02)
    train(folder, "muon", **more)
    train(folder, "muon", **more | dict(balance=0.0, init_from="resume", max_iters=9))
    code, _, err = run(folder, "train.py", *tiny(folder / "muon", experts=2, init_from="resume"))
    assert code == 2 and "experts 4 (asked for: 2)" in err
    code, _, err = run(folder, "convert.py", "ckpt-to-hf", folder / "muon", folder / "hf")
    assert code == 2 and "transformers has no class" in err


@pytest.mark.slow
def test_documents_do_not_see_each_other(tmp_path, resumes):
    folder = copy_program(tmp_path / "copy", "documents")
    resumes(folder)
    assert_sampled_right(folder, "straight")
    code = """
import torch
from data.loader import to_batch
from model import GPT, GPTConfig
block = torch.randint(1, 20, (1, 17))
block[0, 6] = 0
x, y = to_batch(block, torch.device("cpu"))
assert y[0, 5] == -1 and (y != -1).sum() == 15
model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64)).eval()
other = x.clone()
other[0, :6] = 1 + x[0, :6]
torch.testing.assert_close(model(x)[:, 6:], model(other)[:, 6:], atol=0, rtol=0)
assert not torch.equal(model(x)[:, :6], model(other)[:, :6])
"""
    code, _, err = run(folder, "-c", code)
    assert code == 0, err


@pytest.mark.slow
def test_the_average_is_what_is_evaluated_sampled_exported_and_fine_tuned(
    tiny, tmp_path, train, resumes
):
    folder = copy_program(tmp_path / "copy", "average")
    options = dict(eval_interval=8, checkpoint_interval=1, keep_checkpoints=9)
    state = resumes(folder, **options)
    before = checkpoint(folder / "straight", 7)
    for name, average in state["model"].items():
        expected = before["model"][name].lerp(state["raw"][name], 1e-2)
        torch.testing.assert_close(average, expected)
    assert not torch.equal(state["model"]["lm_head.weight"], state["raw"]["lm_head.weight"])
    assert_sampled_right(folder, "straight")
    # evaluated again, as weights to start from: the loss that the run has logged
    again = dict(init_from=folder / "straight" / "best.pt", eval_only=True, dropout=0.1)
    code, stdout, err = run(folder, "train.py", *tiny(folder / "again", **again))
    assert code == 0, err
    losses = dict(column(folder / "straight", "eval", "iter", "val_loss"))
    assert f"val loss {losses[8]:.4f}" in stdout
    code, _, err = run(folder, "convert.py", "ckpt-to-hf", folder / "straight", folder / "hf")
    assert code == 0, err


@pytest.mark.slow
def test_the_optimizer_moves_by_its_rate_and_resumes_bit_for_bit(tmp_path, train):
    folder = copy_program(tmp_path / "copy", "optimizer")
    train(folder, "steps", **LION, weight_decay=0.0, checkpoint_interval=1, keep_checkpoints=9)
    before, after = weights(folder / "steps", 3), weights(folder / "steps", 4)
    lr = dict(column(folder / "steps", "step", "iter", "lr"))[3]
    moved = (after - before).abs()
    # float32 weights of about 1; padded ids have a gradient, too
    assert ((moved - lr).abs() < 1e-6).float().mean() > 0.9
    assert (((moved - lr).abs() < 1e-6) | (moved == 0)).all()
    losses = column(folder / "steps", "eval", "val_loss")
    assert losses[-1] < losses[0] - 0.05

    train(folder, "straight", **LION, dropout=0.1)
    train(folder, "halves", **LION, dropout=0.1, lr_decay_iters=8, max_iters=4)
    train(folder, "halves", **LION, dropout=0.1, lr_decay_iters=8, init_from="resume")
    straight = checkpoint(folder / "straight", 8)
    assert {*straight["optimizer"]["state"][0]} == {"exp_avg"}
    assert_same_state(straight, checkpoint(folder / "halves", 8))


@pytest.mark.slow
def test_the_term_of_the_loss_acts_in_plain_chunked_and_compiled_training(tmp_path, train, stock):
    folder = copy_program(tmp_path / "copy", "loss")
    ways = dict(plain=dict(), chunked=dict(loss_chunk=16), compiled=dict(compile=True))
    without = stock(n_layer=1, loss_chunk="off")
    trained = {}
    for way, changes in ways.items():
        stdout = train(folder, way, n_layer=1, **dict(loss_chunk="off") | changes)
        assert ("compile: " in stdout) == (way == "compiled")
        trained[way] = weights(folder / way)
        added = first(folder / way, "step", "loss") - first(without, "step", "loss")
        assert added == pytest.approx(AT_FIRST, rel=0.02)
        val_loss = first(folder / way, "eval", "val_loss")
        assert val_loss == pytest.approx(first(without, "eval", "val_loss"), rel=1e-6)
    effect = (trained["plain"] - weights(without)).norm()
    for way in ways:  # rounding is far less
        assert (trained[way] - trained["plain"]).norm() < effect / 20, way


@pytest.mark.slow
def test_the_figure_is_on_the_line_and_in_the_records(tmp_path, train, stock, monkeypatch):
    folder = copy_program(tmp_path / "copy", "figure")
    stdout = train(folder, "run", log_interval=2)
    expected = []
    clip = torch.nn.utils.clip_grad_norm_

    def clip_and_note(parameters, most):
        parameters = [*parameters]
        expected.append(parameters[0].grad.norm().item())  # GPT's first one is the embedding
        return clip(parameters, most)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_note)
    assert_same_state(checkpoint(folder / "run", 8), checkpoint(stock(), 8))
    shown = column(folder / "run", "step", "wte_norm")
    assert shown == pytest.approx([expected[it] for it in (0, 2, 4, 6, 7)], rel=1e-6)
    lines = [line for line in stdout.splitlines() if line.startswith("iter ")]
    assert [line.partition(", wte_norm ")[2] for line in lines] == [f"{x:.2e}" for x in shown]


@pytest.mark.slow
def test_the_rates_of_the_schedule_are_its_formulas(tmp_path, train):
    folder = copy_program(tmp_path / "copy", "schedule")
    train(folder, "run", **SCHEDULE)
    rates = column(folder / "run", "step", "lr")
    assert rates == pytest.approx(RATES)


@pytest.mark.slow
def test_all_experiments_at_once(tmp_path, train):
    folder = copy_program(tmp_path / "copy", *DIFFS)
    changes = dict(mlp="swiglu", optimizer="lion", **SCHEDULE)
    train(folder, "straight", **changes)
    train(folder, "halves", **changes, lr_decay_iters=8, max_iters=4)
    train(folder, "halves", **changes, init_from="resume")
    straight, halves = checkpoint(folder / "straight", 8), checkpoint(folder / "halves", 8)
    assert_same_state(straight, halves)
    assert "transformer.h.1.mlp.c_gate.weight" in straight["model"]
    assert {*straight["optimizer"]["state"][0]} == {"exp_avg"}
    steps = folder / "halves"
    assert column(steps, "step", "lr") == pytest.approx(RATES)
    assert all(norm > 0 for norm in column(steps, "step", "wte_norm"))
    others = copy_program(tmp_path / "others", *(name for name in DIFFS if name != "loss"))
    train(others, "run", **changes, max_iters=1)
    added = first(steps, "step", "loss") - first(others / "run", "step", "loss")
    assert added == pytest.approx(AT_FIRST, rel=0.02)
