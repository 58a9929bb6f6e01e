"""
People change the program: a key, a weight, a group, an optimizer. What it promises then.

Each change is a small patch of a copy of the program. The patches below follow the code that they
change; the tests do not.
"""

import itertools
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from program import (
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
    write_tokens,
)

TINY = dict(
    n_layer=2,
    n_head=2,
    n_embd=32,
    block_size=16,
    batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    warmup_iters=2,
    max_iters=8,
    lr_decay_iters=8,
    eval_interval=4,
    eval_tokens=256,
    keep_checkpoints=9,
    log_interval=1,
    device="cpu",
    dtype="float32",
    compile=False,
)
SAMPLE = dict(num_samples=1, max_new_tokens=30, start="ab", device="cpu", dtype="float32")

# -----------------------------------------------------------------------------
# The patches

# a factor of the token embedding
NEW_KEY = {
    "configurator.py": [
        (
            "    recompute: bool = False",
            "    scale: float = 1.0  # of the embedding\n    recompute: bool = False",
        )
    ],
    "model.py": [
        ("    flash: bool = True", "    scale: float = 1.0\n    flash: bool = True"),
        (
            "x = self.transformer.wte(idx[:, past:]) +",
            "x = self.config.scale * self.transformer.wte(idx[:, past:]) +",
        ),
    ],
}


def new_weight(made: str, used: str) -> dict:
    """A weight outside the blocks, which the forward pass uses."""
    return {
        "model.py": [
            (
                "        self.lm_head = nn.Linear(",
                f"        self.extra = {made}\n        self.lm_head = nn.Linear(",
            ),
            (
                "        return self.transformer.ln_f(x)",
                f"        return self.transformer.ln_f({used})",
            ),
        ]
    }


LINEAR = "nn.Linear(config.n_embd, config.n_embd, bias=False)"
CUBE = "nn.Parameter(torch.ones(2, 3, config.n_embd))"
NEW_WEIGHTS = {
    "extra.weight": new_weight(LINEAR, "x + self.extra(x)"),
    "extra": new_weight(CUBE, "x * self.extra.mean((0, 1))"),
}


def adamw_groups(decayed: str, others: str) -> dict:
    """AdamW's two groups: these lists of named weights."""
    return {
        "train.py": [
            (f"matrices = {MATRICES}", f"matrices = {decayed}"),
            (f"vectors = {VECTORS}", f"vectors = {others}"),
        ]
    }


MATRICES = "[(name, p) for name, p in weights if p.dim() >= 2]"
VECTORS = "[(name, p) for name, p in weights if p.dim() < 2]"
POSITIONS_WITHOUT_DECAY = adamw_groups(
    "[(name, p) for name, p in weights if p.dim() >= 2 and 'wpe' not in name]",
    "[(name, p) for name, p in weights if p.dim() < 2 or 'wpe' in name]",
)
# groups of the same sizes and shapes, in which the two layers have changed places
EXCHANGED_LAYERS = adamw_groups(
    "[(n, model.get_parameter(n)) for name, p in weights if p.dim() >= 2 for n in ["
    "name.replace('.h.0.', '.h.x.').replace('.h.1.', '.h.0.').replace('.h.x.', '.h.1.')]]",
    VECTORS,
)
FORGOTTEN_VECTORS = adamw_groups(MATRICES, "[]")


def optimizer(made: str) -> dict:
    """What optimizer=adamw makes of its groups."""
    return {"train.py": [("return torch.optim.AdamW(groups, fused=fused)", f"return {made}")]}


ADAMW = "torch.optim.AdamW(groups, fused=False)"
SGD = "torch.optim.SGD(groups, momentum=0.9)"
ADAFACTOR = "torch.optim.Adafactor(groups)"

# -----------------------------------------------------------------------------
# The tests


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens", [700, 37, 500], [250, 150])


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory) -> Path:
    """A whole run of the unchanged program."""
    out_dir = tmp_path_factory.mktemp("whole")
    train(**TINY, dataset=tokens, out_dir=out_dir)
    return out_dir


@pytest.fixture
def half(whole, tmp_path) -> Path:
    """The same run, stopped halfway."""
    out_dir = tmp_path / "half"
    shutil.copytree(whole, out_dir, ignore=shutil.ignore_patterns("ckpt-00000008.pt", "best.pt"))
    return out_dir


def train_changed(program: Path, **keys) -> Result:
    return finish(start("train.py", *flags(**TINY | keys), cwd=program, only_torch=True))


def sample_changed(program: Path, path: Path) -> Result:
    command = flags(**SAMPLE, init_from=path)
    return finish(start("sample.py", *command, cwd=program, only_torch=True))


def assert_refused(result: Result, *words: str) -> None:
    """In one line of error. It has these words, or a warning has, and not only in a path."""
    assert result.code in (1, 2)
    lines = result.err.splitlines()
    errors = [line for line in lines if not line.startswith("warning: ")]
    assert len(errors) == 1 and errors[0].startswith("error: "), result.err
    text = " ".join(part for part in result.err.split() if "/" not in part)
    for word in words:
        assert word in text


@pytest.mark.parametrize("key", ["recompute", "value_tables", "tf32"])
def test_a_key_that_a_checkpoint_lacks_has_its_default(key, tokens, whole, half):
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


def test_a_new_key_has_its_default_in_runs_from_before_it(tokens, whole, half, tmp_path):
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


@pytest.mark.parametrize("name", NEW_WEIGHTS)
def test_muon_refuses_a_weight_that_it_knows_no_group_for(name, tokens, tmp_path):
    program = changed(tmp_path / "program", NEW_WEIGHTS[name])
    out_dir = tmp_path / "out"
    result = train_changed(program, dataset=tokens, out_dir=out_dir, optimizer="muon")
    assert_refused(result, name)
    assert not out_dir.exists()


def assert_every_weight_is_in_one_group(state: dict) -> None:
    groups = [group["params"] for group in state["optimizer"]["param_groups"]]
    storages = {weight.data_ptr() for weight in state["model"].values()}  # a tied one counts once
    assert sorted(sum(groups, [])) == list(range(len(storages)))
    assert state["optimizer"]["state"].keys() == set(range(len(storages)))


@pytest.mark.parametrize("name", NEW_WEIGHTS)
def test_adamw_trains_a_new_weight(name, tokens, tmp_path):
    program = changed(tmp_path / "program", NEW_WEIGHTS[name])
    result = train_changed(program, dataset=tokens, out_dir=tmp_path / "out", max_iters=1)
    assert result.code == 0, result.err
    state = checkpoint(tmp_path / "out", 1)
    weight = state["model"][name]
    if weight.dim() > 2:  # made of ones, and init_weights knows only matrices of layers
        assert (weight - 1).abs().max() < TINY["learning_rate"]
    assert_every_weight_is_in_one_group(state)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "model",
    [
        dict(model="gpt2", bias=True),
        dict(model="gpt2", tie_weights=False),
        dict(model="fast", value_tables=1, bigram_rows=50),
    ],
    ids=lambda keys: " ".join(map(str, keys.values())),
)
def test_every_weight_is_in_one_group(model, optimizer, tokens, tmp_path):
    train(**TINY | model | dict(max_iters=1, optimizer=optimizer, dataset=tokens, out_dir=tmp_path))
    assert_every_weight_is_in_one_group(checkpoint(tmp_path, 1))


def test_a_weight_in_no_group_is_refused_by_name(tokens, tmp_path):
    program = changed(tmp_path / "program", FORGOTTEN_VECTORS)
    result = train_changed(program, dataset=tokens, out_dir=tmp_path / "out")
    assert_refused(result, "transformer.ln_f.weight")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(POSITIONS_WITHOUT_DECAY, id="other sizes"),
        pytest.param(EXCHANGED_LAYERS, id="equal shapes"),
    ],
)
def test_a_run_whose_groups_differ_is_not_resumed(change, tokens, half, tmp_path):
    program = changed(tmp_path / "program", change)
    before = (half / "ckpt-00000004.pt").read_bytes()
    result = train_changed(program, dataset=tokens, out_dir=half, init_from="resume")
    assert_refused(result, "group")
    assert [path.name for path in half.glob("*.pt")] == ["ckpt-00000004.pt"]
    assert (half / "ckpt-00000004.pt").read_bytes() == before


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(ADAMW, id="AdamW"),
        pytest.param(SGD, id="SGD"),
        pytest.param(ADAFACTOR, id="Adafactor"),
    ],
)
def test_an_optimizer_that_is_not_fused_trains_and_resumes_bit_for_bit(made, tokens, tmp_path):
    program = changed(tmp_path / "program", optimizer(made))
    out_dir = tmp_path / "whole"
    result = train_changed(program, dataset=tokens, out_dir=out_dir)
    assert result.code == 0, result.err
    losses = column(out_dir, "step", "loss")
    assert losses[-1] < losses[0] - 0.005  # Adafactor's updates are small
    halves = tmp_path / "halves"
    shutil.copytree(out_dir, halves, ignore=shutil.ignore_patterns("ckpt-00000008.pt", "best.pt"))
    result = train_changed(program, dataset=tokens, out_dir=halves, init_from="resume")
    assert result.code == 0, result.err
    assert_same_run(halves, out_dir, 8)


def test_an_optimizer_that_is_not_fused_skips_the_update_of_a_gradient_of_nan(tokens, tmp_path):
    adamw, backward = torch.optim.AdamW, torch.Tensor.backward
    passes = itertools.count()

    def spoilt(loss):
        is_bad = next(passes) == 5 * 2  # two micro-batches an iteration
        backward(loss * torch.nan if is_bad else loss)

    plain = mock.patch("torch.optim.AdamW", lambda groups, fused: adamw(groups, fused=False))
    keys = TINY | dict(checkpoint_interval=1, dataset=tokens, out_dir=tmp_path)
    with plain, mock.patch.object(torch.Tensor, "backward", spoilt):
        train(**keys)
    before, after, later = (checkpoint(tmp_path, it) for it in (5, 6, 7))
    assert not before["optimizer"]["param_groups"][0]["fused"]
    assert same(before["model"], after["model"])
    assert same(before["optimizer"]["state"], after["optimizer"]["state"])
    assert not same(after["model"], later["model"])
