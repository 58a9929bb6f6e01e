"""
Change the program as people do: a key, a weight, an optimizer group, an optimizer, a model. Run the
experiments of docs/hacking.md, whose functions replace the functions of the same name in a copy of
the program.
"""

import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases import slow_but
from program import (
    ROOT,
    TINY_RUN,
    Result,
    assert_same_run,
    changed,
    checkpoint,
    column,
    finish,
    flags,
    run,
    same,
    start,
    train,
    with_definitions,
    write_tokens,
)
from torch import Tensor

from reports.picture import draw
from reports.runs import open_run

TINY = TINY_RUN | dict(
    learning_rate=1e-2,
    warmup_iters=2,
    max_iters=8,
    lr_decay_iters=8,
    eval_interval=4,
    eval_tokens=256,
    keep_checkpoints=9,
)
SAMPLE = dict(num_samples=1, max_new_tokens=30, start="ab", device="cpu", dtype="float32")

# -----------------------------------------------------------------------------
# The changes

# a factor on the head's input
NEW_KEY = {
    "configurator.py": "class Config:\n    scale: float = 1.0",
    "model.py": """
class GPTConfig:
    scale: float = 1.0

unscaled = GPT.hidden
GPT.hidden = lambda self, *idx: self.config.scale * unscaled(self, *idx)
""",
}


def new_weight(made: str, used: str) -> dict:
    """Return a change that adds a weight outside the blocks and uses it in the forward pass."""
    code = f"""
plain_init, plain_hidden = GPT.__init__, GPT.hidden

def init(self, config):
    plain_init(self, config)
    self.extra = {made}

def hidden(self, *idx):
    x = plain_hidden(self, *idx)
    return {used}

GPT.__init__, GPT.hidden = init, hidden
"""
    return {"model.py": code}


LINEAR = "nn.Linear(config.n_embd, config.n_embd, bias=False)"
CUBE = "nn.Parameter(torch.ones(2, 3, config.n_embd))"
NEW_WEIGHTS = {
    "extra.weight": new_weight(LINEAR, "x + self.extra(x)"),
    "extra": new_weight(CUBE, "x * self.extra.mean((0, 1))"),
}


def changed_groups(change: str) -> dict:
    """
    Return a change to AdamW's groups, `decayed` and `others`, which acts before a resume checks
    them.
    """
    code = f"""
plain_build = build_optimizer

def build(*arguments):
    optimizer = plain_build(*arguments)
    decayed, others = optimizer.param_groups
    names = decayed["param_names"]
    {change}
    return optimizer

build_optimizer = build
"""
    return {"train.py": code}


POSITIONS_WITHOUT_DECAY = changed_groups(
    "for key in ('param_names', 'params'):"
    " others[key].append(decayed[key].pop(1))  # the position embedding"
)
# groups of the same sizes and shapes, in which the two layers have changed places
EXCHANGED_LAYERS = changed_groups(
    "order = [names.index(name.replace('.h.0.', '.x.').replace('.h.1.', '.h.0.')"
    ".replace('.x.', '.h.1.')) for name in names];"
    " decayed.update({key: [decayed[key][n] for n in order] for key in ('param_names', 'params')})"
)

# -----------------------------------------------------------------------------
# Keys, weights, groups, optimizers


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory) -> Path:
    """Train a whole run with the unchanged program."""
    out_dir = tmp_path_factory.mktemp("whole")
    train(**TINY, dataset=tokens, out_dir=out_dir)
    return out_dir


@pytest.fixture
def half(whole, tmp_path) -> Path:
    """Copy `whole` without best.pt and the last checkpoint, so that a resume starts halfway."""
    out_dir = tmp_path / "half"
    shutil.copytree(whole, out_dir, ignore=shutil.ignore_patterns("ckpt-00000008.pt", "best.pt"))
    return out_dir


def train_changed(program: Path, **keys) -> Result:
    return finish(start("train.py", *flags(**TINY | keys), cwd=program, only_torch=True))


def sample_changed(program: Path, path: Path) -> Result:
    command = flags(**SAMPLE, init_from=path)
    return finish(start("sample.py", *command, cwd=program, only_torch=True))


def assert_refused(result: Result, *words: str) -> None:
    """Check for exactly one error line, and for these words on stderr outside of paths."""
    assert result.code in (1, 2)
    lines = result.err.splitlines()
    errors = [line for line in lines if not line.startswith("warning: ")]
    assert len(errors) == 1 and errors[0].startswith("error: "), result.err
    text = " ".join(part for part in result.err.split() if "/" not in part)
    for word in words:
        assert word in text


@pytest.mark.parametrize("key", slow_but("recompute", of=["recompute", "tf32"]))
def test_a_checkpoint_without_a_key_resumes_with_the_keys_default(key, tokens, whole, half):
    path = half / "ckpt-00000004.pt"
    state = torch.load(path, weights_only=True)
    del state["config"][key]
    state["model_config"].pop(key, None)
    torch.save(state, path)
    sample = run("sample.py", *flags(**SAMPLE, init_from=path))
    assert sample.code == 0, sample.err
    text = run("sample.py", *flags(**SAMPLE, init_from=whole / "ckpt-00000004.pt")).out
    assert sample.out.replace(str(half), "") == text.replace(str(whole), "")
    train(**TINY, dataset=tokens, out_dir=half, init_from="resume")
    assert_same_run(half, whole, 8)
    assert key in checkpoint(half, 8)["config"]


def test_a_run_from_before_a_new_key_resumes_with_the_keys_default(tokens, whole, half, tmp_path):
    program = changed(tmp_path / "program", NEW_KEY)
    keys = dict(dataset=tokens, out_dir=half, init_from="resume")
    assert_refused(train_changed(program, **keys, scale=2.0), "scale")
    result = train_changed(program, **keys)
    assert result.code == 0, result.err
    assert_same_run(half, whole, 8)
    assert checkpoint(half, 8)["config"]["scale"] == 1.0
    ours = run("sample.py", *flags(**SAMPLE, init_from=whole / "ckpt-00000008.pt"))
    theirs = sample_changed(program, whole / "ckpt-00000008.pt")
    assert theirs.code == 0, theirs.err
    assert theirs.out == ours.out


@pytest.mark.parametrize("name", slow_but("extra", of=NEW_WEIGHTS))
def test_muon_refuses_a_new_weight_by_name_if_it_fits_none_of_its_groups(name, tokens, tmp_path):
    program = changed(tmp_path / "program", NEW_WEIGHTS[name])
    out_dir = tmp_path / "out"
    result = train_changed(program, dataset=tokens, out_dir=out_dir, optimizer="muon")
    assert_refused(result, name)
    assert not out_dir.exists()


def assert_every_weight_is_in_one_group(state: dict) -> None:
    groups = [group["params"] for group in state["optimizer"]["param_groups"]]
    # a tied weight counts once
    storages = {weight.data_ptr() for weight in state["model"].values()}
    assert sorted(sum(groups, [])) == list(range(len(storages)))
    assert state["optimizer"]["state"].keys() == set(range(len(storages)))


@pytest.mark.parametrize("name", slow_but("extra", of=NEW_WEIGHTS))
def test_adamw_trains_a_weight_that_was_added_to_the_model(name, tokens, tmp_path):
    program = changed(tmp_path / "program", NEW_WEIGHTS[name])
    result = train_changed(program, dataset=tokens, out_dir=tmp_path / "out", max_iters=1)
    assert result.code == 0, result.err
    state = checkpoint(tmp_path / "out", 1)
    weight = state["model"][name]
    if weight.dim() > 2:  # starts as ones: init_weights sets only the layers' matrices
        assert (weight - 1).abs().max() < TINY["learning_rate"]
    assert_every_weight_is_in_one_group(state)


@pytest.mark.parametrize("optimizer", slow_but("muon", of=["adamw", "muon"]))
@pytest.mark.parametrize(
    "model",
    [
        dict(model="gpt2", bias=True),
        dict(model="gpt2", tie_weights=False),
        dict(model="fast", bias=True),
    ],
    ids=lambda keys: " ".join(map(str, keys.values())),
)
def test_every_weight_is_in_exactly_one_optimizer_group(model, optimizer, tokens, tmp_path):
    train(**TINY | model | dict(max_iters=1, optimizer=optimizer, dataset=tokens, out_dir=tmp_path))
    assert_every_weight_is_in_one_group(checkpoint(tmp_path, 1))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(POSITIONS_WITHOUT_DECAY, id="other sizes"),
        pytest.param(EXCHANGED_LAYERS, id="equal shapes"),
    ],
)
def test_resuming_is_refused_if_the_optimizer_groups_changed(change, tokens, half, tmp_path):
    program = changed(tmp_path / "program", change)
    before = (half / "ckpt-00000004.pt").read_bytes()
    result = train_changed(program, dataset=tokens, out_dir=half, init_from="resume")
    assert_refused(result, "group")
    assert [path.name for path in half.glob("*.pt")] == ["ckpt-00000004.pt"]
    assert (half / "ckpt-00000004.pt").read_bytes() == before


ADAMW = torch.optim.AdamW
NOT_FUSED = dict(
    AdamW=lambda groups, fused: ADAMW(groups, fused=False),
    SGD=lambda groups, fused: torch.optim.SGD(groups, momentum=0.9),
    Adafactor=lambda groups, fused: torch.optim.Adafactor(groups),
)


@pytest.mark.parametrize("name", slow_but("SGD", of=NOT_FUSED))
def test_an_unfused_optimizer_trains_and_resumes_bit_for_bit(name, tokens, tmp_path):
    out_dir, halves = tmp_path / "whole", tmp_path / "halves"
    with mock.patch("torch.optim.AdamW", NOT_FUSED[name]):
        train(**TINY, dataset=tokens, out_dir=out_dir)
        newest = shutil.ignore_patterns("ckpt-00000008.pt", "best.pt")
        shutil.copytree(out_dir, halves, ignore=newest)
        train(**TINY, dataset=tokens, out_dir=halves, init_from="resume")
    losses = column(out_dir, "step", "loss")
    assert losses[-1] < losses[0] - 0.005  # Adafactor's updates are small
    assert_same_run(halves, out_dir, 8)


def test_an_unfused_optimizer_skips_the_update_if_a_gradient_is_nan(tokens, tmp_path):
    backward = torch.Tensor.backward
    passes = itertools.count()

    def spoilt(loss):
        is_bad = next(passes) == 5 * 2  # two micro-batches an iteration
        backward(loss * torch.nan if is_bad else loss)

    plain = mock.patch("torch.optim.AdamW", NOT_FUSED["AdamW"])
    keys = TINY | dict(checkpoint_interval=1, dataset=tokens, out_dir=tmp_path)
    with plain, mock.patch.object(torch.Tensor, "backward", spoilt):
        train(**keys)
    before, after, later = (checkpoint(tmp_path, it) for it in (5, 6, 7))
    assert not before["optimizer"]["param_groups"][0]["fused"]
    assert same(before["model"], after["model"])
    assert same(before["optimizer"]["state"], after["optimizer"]["state"])
    assert not same(after["model"], later["model"])


# -----------------------------------------------------------------------------
# Changed models

# FLOPs of TINY, with its vocabulary of 61 padded to 128
TINY_LAYER, TINY_HEAD, TINY_ATTENTION = 6 * 12 * 32**2, 6 * 32 * 128, 12 * 32 * 16

WINDOWS = """
def attend(q, k, v, flash, scale, dropout=0.0):
    q, k, v = (part.unflatten(2, (-1, 4)) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2, 3)
"""
# like a kernel that needs a GPU, or a model that reads numbers on the host
NEEDS_MEMORY = """
plain_hidden = GPT.hidden

def hidden(self, *idx):
    x = plain_hidden(self, *idx)
    x.sum().item()
    return x

GPT.hidden = hidden
"""
MODELS = {  # code in model.py, and the FLOPs per token with it
    # each token meets a quarter of the keys
    "attention in windows": (WINDOWS, 3 * (TINY_LAYER + TINY_ATTENTION / 4) + TINY_HEAD),
    "does not run without memory": (NEEDS_MEMORY, None),
}


@pytest.mark.parametrize("name", slow_but("attention in windows", of=MODELS))
def test_the_flops_of_a_changed_model_are_counted_from_what_it_computes(name, tokens, tmp_path):
    """Print no MFU if the FLOPs cannot be counted."""
    code, flops = MODELS[name]
    program = changed(tmp_path / "program", {"model.py": code})
    keys = TINY | dict(
        n_layer=3, max_iters=1, peak_tflops=1, dataset=tokens, out_dir=tmp_path / "run"
    )
    result = finish(start("train.py", *flags(**keys), cwd=program, only_torch=True))
    assert result.code == 0, result.err
    assert column(tmp_path / "run", "start", "flops_per_token") == [flops]
    assert ("mfu n/a, tok/s" in result.out) == (flops is None)


# an MLP that draws with rand and randn besides dropout, counts its calls, and holds a mask of
# infinities, which may be saved: only weights that have become infinite are refused
NOISY = {
    "model.py": """
plain_init, plain_forward = MLP.__init__, MLP.forward

def init(self, config):
    plain_init(self, config)
    self.register_buffer("calls", torch.zeros(()))
    self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))

def forward(self, x):
    y = plain_forward(self, x)
    if not self.training:
        return y
    self.calls += 1
    return y * (torch.rand(()) + torch.randn(()) + 1)

MLP.__init__, MLP.forward = init, forward
"""
}
# several launches in one process, because importing the changed program takes two seconds; each
# begins with another random state. The last launch's compiler changes nothing.
LAUNCHES = """
import runpy, sys
import torch
given = sys.argv[1:]
for out_dir, *last in (
    ("straight", "--max_iters=8"),
    ("halves", "--max_iters=4"),
    ("halves", "--max_iters=8", "--init_from=resume"),
    ("compiled", "--max_iters=8", "--compile=True"),
):
    torch.compile = lambda call: call
    torch.seed()
    sys.argv = ["train.py", *given, f"--out_dir={out_dir}", *last]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as end:
        assert not end.code
"""


def test_a_models_own_random_numbers_and_buffers_are_seeded_saved_and_resumed(tokens, tmp_path):
    """Change neither when compiled code is compared with eager code."""
    program = changed(tmp_path / "program", NOISY)
    words = flags(**TINY, dropout=0.1, dataset=tokens)
    result = finish(start("-c", LAUNCHES, *words, cwd=program, only_torch=True))
    assert result.code == 0, result.err
    assert "warning" not in result.err
    assert_same_run(program / "straight", program / "halves", 8)
    assert_same_run(program / "straight", program / "compiled", 8)
    weights = checkpoint(program / "straight", 8)["model"]
    assert weights["transformer.h.0.mlp.calls"] == 8 * 2  # micro-batches
    assert weights["transformer.h.0.mlp.mask"][0, 1] == float("-inf")


# -----------------------------------------------------------------------------
# The experiments of docs/hacking.md: blocks of code that begin with the name of a file

PAGE = (ROOT / "docs/hacking.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.M | re.S)
LOSS, LION, SCHEDULE, AVERAGING, EXCHANGE = (
    {file: code for file, code in BLOCKS if name in code}
    for name in ("def loss_sum(", "class Lion(", "def get_lr(", "class Averaging(", "def exchange(")
)
[SECOND] = re.findall(r"^```python\n(    if c\.second:.*?)^```$", PAGE, re.M | re.S)
SECOND_KEY = """
class Config:
    second: str = ""

PATHS = ("out_dir", "init_from", "dataset", "second")
MAY_BE_BLANK = ("start", "second")
"""
SPLITS_LINE = '    splits = {"train": data.train, "val": data.val}\n'
ADAMW_LINE = "    return torch.optim.AdamW(groups, fused=fused)\n"


def edited(program: Path, *edits: tuple[str, str]) -> Path:
    """Replace lines of a changed program's train.py, as the page says."""
    text = (program / "train.py").read_text("utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (program / "train.py").write_text(text, "utf-8")
    return program


Z = 1e-4
# the z-loss with a key in place of the number, as the page says
Z_LOSS_KEY = {
    "configurator.py": "class Config:\n    z_loss: float = 0.0",
    "model.py": LOSS["model.py"].replace("1e-4", "config.z_loss")
    + """
class GPTConfig:
    z_loss: float = 0.0

FREE_ON_RESUME |= {"z_loss"}
""",
}


@pytest.mark.slow
def test_the_documented_z_loss_acts_in_plain_chunked_and_compiled_training(tokens, tmp_path):
    """Leave the validation loss as it is, and let a resume change the key."""
    ways = dict(plain=dict(), chunked=dict(loss_chunk=16), compiled=dict(compile=True))
    keys = dict(dataset=tokens, n_layer=1, loss_chunk="off")
    train(**TINY | keys, out_dir=tmp_path / "without")
    program = changed(tmp_path / "program", Z_LOSS_KEY)
    trained = {}
    for way, changes in ways.items():
        result = train_changed(program, **keys | changes, z_loss=2 * Z, out_dir=tmp_path / way)
        assert result.code == 0, result.err
        trained[way] = weights(tmp_path / way)
        losses, stock = (column(tmp_path / name, "step", "loss")[0] for name in (way, "without"))
        # to an untrained model all 128 ids are about equally likely
        assert losses - stock == pytest.approx(2 * Z * math.log(128) ** 2, rel=0.02)
        evaluations = [column(tmp_path / name, "eval", "val_loss")[0] for name in (way, "without")]
        assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-6)
    effect = (trained["plain"] - weights(tmp_path / "without")).norm()
    for way in ways:  # rounding errors are far smaller
        assert (trained[way] - trained["plain"]).norm() < effect / 20, way
    again = dict(out_dir=tmp_path / "plain", init_from="resume", max_iters=9, z_loss=0.0)
    result = train_changed(program, **keys | again)
    assert result.code == 0, result.err


def tied(state: dict) -> list[Tensor]:
    """Return the weights of a checkpoint in the order of the optimizer's groups."""
    names = [n for group in state["optimizer"]["param_groups"] for n in group["param_names"]]
    return [state["model"][name] for name in names]


def weights(out_dir: Path, iter_num: int = TINY["max_iters"]) -> Tensor:
    return torch.cat([w.flatten() for w in checkpoint(out_dir, iter_num)["model"].values()])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_documented_lion_moves_weights_by_its_learning_rate_and_resumes_bit_for_bit(
    dtype, tokens, tmp_path
):
    program = edited(changed(tmp_path / "program", LION), (ADAMW_LINE, "    return Lion(groups)\n"))
    keys = dict(dataset=tokens, learning_rate=1e-3, weight_decay=0.0, grad_clip=0.0, dtype=dtype)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    result = train_changed(program, **keys, checkpoint_interval=1, out_dir=whole)
    assert result.code == 0, result.err
    moved = (weights(whole, 4) - weights(whole, 3)).abs()
    lr = dict(column(whole, "step", "iter", "lr"))[3]
    # allows for float32 rounding of weights of about 1; padded ids have a gradient, too
    assert ((moved - lr).abs() < 1e-6).float().mean() > 0.9
    assert (((moved - lr).abs() < 1e-6) | (moved == 0)).all()
    losses = column(whole, "eval", "val_loss")
    assert losses[-1] < losses[0] - 0.05
    halves.mkdir()
    for name in ("ckpt-00000004.pt", "metrics.jsonl"):
        shutil.copy(whole / name, halves)
    result = train_changed(program, **keys, out_dir=halves, init_from="resume")
    assert result.code == 0, result.err
    assert_same_run(halves, whole, 8)


def test_the_documented_1_sqrt_schedule_follows_its_formula(tokens, tmp_path):
    program = changed(tmp_path / "program", SCHEDULE)
    keys = dict(lr_schedule="wsd", decay_fraction=0.5, min_lr=6e-5)
    result = train_changed(program, **keys, dataset=tokens, out_dir=tmp_path / "run")
    assert result.code == 0, result.err
    expected = [0.01 / 1.4, *[0.01] * 4]  # warmup takes 5% of 8 iterations; decay from 4 on
    expected += [6e-5 + (0.01 - 6e-5) * (1 - math.sqrt(share)) for share in (0.25, 0.5, 0.75)]
    assert column(tmp_path / "run", "step", "lr") == pytest.approx(expected)


def test_the_documented_average_is_evaluated_and_saved_and_resumes_bit_for_bit(tokens, tmp_path):
    program = changed(
        tmp_path / "program", {"train.py": AVERAGING["train.py"] + EXCHANGE["train.py"]}
    )
    call, moment = "exchange(optimizer)\n", "                moments[name] = moment.clone()\n"
    edited(
        program,
        (ADAMW_LINE, "    return Averaging(groups, fused=fused)\n"),
        ("        losses = None\n", f"        {call}        losses = None\n"),
        (
            "        if stop:\n            break\n",
            f"        {call}        if stop:\n            break\n",
        ),
        (moment, f"{moment}    {call}"),
    )
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    keys = dict(dataset=tokens, dropout=0.1, checkpoint_interval=1)
    for out_dir in (whole, halves):
        result = train_changed(program, **keys, init_from="auto", out_dir=out_dir)
        assert result.code == 0, result.err
        if out_dir == whole:
            halves.mkdir()
            shutil.copy(whole / "ckpt-00000003.pt", halves)
            shutil.copy(whole / "metrics.jsonl", halves)
    assert_same_run(whole, halves, 8)
    for it in range(2, 8):
        before, after = checkpoint(whole, it - 1), checkpoint(whole, it)
        for n, (old, new) in enumerate(zip(tied(before), tied(after), strict=True)):
            raw = after["optimizer"]["state"][n]["average"]
            assert torch.allclose(new, old + 0.01 * (raw - old), atol=1e-7)
    again = train_changed(program, **keys, init_from=whole / "ckpt-00000004.pt", eval_only=True)
    assert f"val_loss: {column(whole, 'eval', 'val_loss')[1]:.4f}" in again.out


def test_the_documented_second_validation_set_is_checked_printed_recorded_and_drawn(
    tokens, tmp_path
):
    program = changed(tmp_path / "program", {"configurator.py": SECOND_KEY})
    edited(program, (SPLITS_LINE, SPLITS_LINE + SECOND))
    keys = dict(dataset=tokens, out_dir=tmp_path / "run")
    assert "--second=PATH" in train_changed(program, **keys, second="nowhere").err
    other = write_tokens(tmp_path / "other", [700], [300], vocab=77)
    assert_refused(train_changed(program, **keys, second=other), "second: ")
    result = train_changed(program, **keys, second=tokens)
    assert result.code == 0, result.err
    losses = column(tmp_path / "run", "eval", "train_loss", "val_loss", "second_loss")
    line = "step 8: train loss {:.4f}, val loss {:.4f}, second loss {:.4f}, time "
    assert line.format(*losses[-1]) in result.out
    assert all(val == second for _, val, second in losses)
    figure = pytest.importorskip("matplotlib.figure").Figure()
    draw(figure, [[open_run(tmp_path / "run")]])
    assert "second loss of run" in figure.axes[0].get_legend_handles_labels()[1]


@pytest.mark.slow
def test_the_documented_code_passes_ruff_and_mypy(tmp_path):
    code = "".join(code for file, code in BLOCKS if file == "train.py")
    program = changed(
        tmp_path / "program", LOSS | {"train.py": code, "configurator.py": SECOND_KEY}
    )
    edited(
        program,
        (ADAMW_LINE, "    return Lion(groups)\n"),
        (SPLITS_LINE, SPLITS_LINE + SECOND),
    )
    shutil.copy(ROOT / "pyproject.toml", program)
    for tool in (("ruff", "check", "train.py", "model.py"), ("mypy", "train.py", "model.py")):
        done = subprocess.run(
            [sys.executable, "-m", *tool], cwd=program, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def test_the_functions_named_in_the_hacking_guide_exist():
    files = {*re.findall(r"\b((?:\w+/)*\w+\.py)\b", PAGE)}
    code = "\n".join((ROOT / file).read_text("utf-8") for file in files if (ROOT / file).exists())
    named = {
        *re.findall(r"`(\w+)\(\)`", PAGE),
        *re.findall(r"`(\w+)` (?:in|of) `?\w+/?\w+\.py", PAGE),
    }
    assert {"get_lr", "loss_sum", "build_optimizer"} <= named
    assert [name for name in named if not re.search(rf"(def|class|^) ?{name}\b", code, re.M)] == []


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_the_documented_loop_trains_both_versions_and_ends_with_a_verdict(tokens, tmp_path):
    """Run the loop with tiny models, two seeds, and a few iterations instead of hours."""
    clones, loop = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    keys = shlex.join(flags(**TINY | dict(dataset=tokens, max_iters=4, warmup_iters=1)))
    loop = re.sub(r"dev/\S+ idea.py --hours=\S+", f"idea.py {keys}", loop)
    loop = loop.replace("1 2 3 4", "1 2")
    here = changed(tmp_path / "here", {})
    (here / ".gitignore").write_text("out/\n")
    names = {f"GIT_{who}_{w}": "a@b" for who in ("AUTHOR", "COMMITTER") for w in ("NAME", "EMAIL")}
    environment = os.environ | names | dict(OMP_NUM_THREADS="1")
    environment |= dict(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def bash(block: str) -> str:
        command = ["bash", "-eu", "-o", "pipefail", "-c", block]
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    bash("git init -q . && git add . && git commit -qm all\n" + clones)
    path = tmp_path / "zloss" / "model.py"
    path.write_text(with_definitions(path.read_text("utf-8"), LOSS["model.py"]), "utf-8")
    out = bash(loop)
    assert out.count("verdict: ") == 1
    losses = re.findall(r"^val_loss: (\S+)$", out, re.M)  # the run and grep both print each line
    assert len(losses) == 2 * 2 * 2
    base, changed_loss = (
        column(here / "out" / name, "step", "loss")[0] for name in ("base-1", "zloss-1")
    )
    assert changed_loss - base == pytest.approx(Z * math.log(128) ** 2, rel=0.02)
