"""
Change the program as people do: a key, a weight, an optimizer group, an optimizer, a model. Run the
experiments of docs/hacking.md, whose functions replace the functions of the same name in a copy of
the program.
"""

import importlib
import json
import math
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from program import (
    ROOT,
    TINY_RUN,
    Result,
    Run,
    assert_same_run,
    changed,
    finish,
    flags,
    refused,
    run,
    start,
    train,
    train_ranks,
    write_tokens,
)

from run.pretrained import read_weights
from tools.curves import draw, open_run

TINY = TINY_RUN | dict(n_layer=2, learning_rate=1e-2, warmup_iters=2, max_iters=8, lr_decay_iters=8)
TINY |= dict(eval_interval=4, eval_tokens=256, keep_checkpoints=9)
LATER = shutil.ignore_patterns("*[4-8].pt")  # than iteration 3
SAMPLE = dict(num_samples=1, max_new_tokens=30, start="ab", device="cpu", dtype="float32")

# -----------------------------------------------------------------------------
# The changes

# a factor on the head's input
NEW_KEY = {
    "configurator.py": "class RunKeys:\n    scale: float = 1.0",
    "model.py": """
class GPTConfig:
    scale: float = 1.0

unscaled = GPT.hidden
GPT.hidden = lambda self, *idx: self.config.scale * unscaled(self, *idx)
""",
}


WINDOWS_AND_CUBE = """
def attend(q, k, v, flash, scale, dropout=0.0):
    q, k, v = (part.unflatten(2, (-1, 4)) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2, 3)

plain_init, plain_hidden = GPT.__init__, GPT.hidden

def init(self, config):
    plain_init(self, config)
    self.extra = nn.Parameter(torch.ones(2, 3, config.n_embd))

def hidden(self, *idx):
    return plain_hidden(self, *idx) * self.extra.mean((0, 1))

GPT.__init__, GPT.hidden = init, hidden
"""


# FLOPs per token of TINY, with its vocabulary of 61 padded to 128
TINY_LAYER, TINY_HEAD, TINY_ATTENTION = 6 * 12 * 32**2, 6 * 32 * 128, 12 * 32 * 16


# runs scripts one after another in one process, because importing a changed program takes two
# seconds; each begins with another random state
LAUNCHES = """
import contextlib, io, json, runpy, sys
import torch
results = []
for script, *words in json.loads(sys.argv[1]):
    torch.seed()
    code, out, err = 0, io.StringIO(), io.StringIO()
    sys.argv = [script, *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


def launches(program: Path, *commands: list[str]) -> list[Result]:
    """Run commands of a changed program, in its folder."""
    result = finish(start("-c", LAUNCHES, json.dumps(commands), cwd=program))
    assert result.code == 0, result.err
    return [Result(*found) for found in json.loads(result.out.splitlines()[-1])]


def training(**keys) -> list[str]:
    return ["train.py", *flags(**TINY | keys)]


def resumed(program: Path, *others: list[str], **keys) -> list[Result]:
    """
    Train with a changed program, whole and resumed from iteration 3 in `halves`, and check that
    both end alike. Returns the results of the whole run and of `others`, which run before the
    resume.
    """
    keys |= dict(checkpoint_interval=1)
    (straight,) = launches(program, training(**keys, out_dir="whole"))
    assert straight.code == 0, straight.err
    shutil.copytree(program / "whole", program / "halves", ignore=LATER)
    again = training(**keys, out_dir="halves", init_from="resume")
    *results, last = launches(program, *others, again)
    assert last.code == 0, last.err
    assert_same_run(program / "halves", program / "whole", 8)
    return [straight, *results]


# -----------------------------------------------------------------------------
# Keys, weights, groups, optimizers


@pytest.fixture
def half(straight, tmp_path) -> Path:
    """Copy `straight` without the last checkpoint, so that a resume starts halfway."""
    out_dir = tmp_path / "half"
    shutil.copytree(straight, out_dir, ignore=shutil.ignore_patterns("ckpt-00000008.pt"))
    return out_dir


def test_a_run_from_before_a_new_key_resumes_with_its_default(tokens, straight, half, tmp_path):
    program = changed(tmp_path / "program", NEW_KEY)
    keys = dict(dataset=tokens, out_dir=half, init_from="resume")
    sampling = ["sample.py", *flags(**SAMPLE, init_from=straight / "ckpt-00000008.pt")]
    other, resumed, theirs = launches(
        program, training(**keys, scale=2.0), training(**keys), sampling
    )
    refused(other, "scale")
    assert (resumed.code, theirs.code) == (0, 0), (resumed, theirs)
    assert_same_run(half, straight, 8)
    assert Run(half).state(8)["config"]["scale"] == 1.0
    assert theirs.out == run(*sampling).out


def test_a_changed_model_is_counted_and_adamw_trains_its_new_weight(tokens, tmp_path):
    """
    Count FLOPs from what the model computes. Muon refuses a weight by name if it fits none of its
    groups.
    """
    program = changed(tmp_path / "program", {"model.py": WINDOWS_AND_CUBE})
    keys = dict(dataset=tokens, max_iters=1, peak_tflops=1)
    by_muon = training(**keys, optimizer="muon", out_dir=tmp_path / "muon")
    muon, adamw = launches(program, by_muon, training(**keys, out_dir=tmp_path / "out"))
    assert adamw.code == 0, adamw.err
    # each token meets a quarter of the keys
    flops = 2 * (TINY_LAYER + TINY_ATTENTION / 4) + TINY_HEAD
    assert Run(tmp_path / "out").column("start", "flops_per_token") == [flops]
    refused(muon, "extra")
    assert not (tmp_path / "muon").exists()
    # starts as ones: init_weights sets only the layers' matrices
    moved = Run(tmp_path / "out").state(1)["model"]["extra"] - 1
    assert 0 < moved.abs().max() < TINY["learning_rate"]


def test_resuming_is_refused_if_the_optimizer_groups_changed(tokens, half):
    """Refuse two layers that change places, although the sizes and shapes in the groups stay."""
    before = (half / "ckpt-00000004.pt").read_bytes()

    def build(groups, fused):
        first, second = groups[0]["params"][2:6], groups[0]["params"][6:]
        groups[0]["params"][2:] = second + first
        return MomentumSGD(groups, fused)

    with mock.patch("torch.optim.AdamW", build):
        refused(run(*training(dataset=tokens, out_dir=half, init_from="resume")), "group")
    assert [path.name for path in half.glob("*.pt")] == ["ckpt-00000004.pt"]
    assert (half / "ckpt-00000004.pt").read_bytes() == before


class MomentumSGD(torch.optim.SGD):
    def __init__(self, groups, fused) -> None:
        super().__init__(groups, momentum=0.9)


def test_an_unfused_optimizer_trains_and_resumes_bit_for_bit(tokens, tmp_path):
    out_dir, halves = tmp_path / "whole", tmp_path / "halves"
    with mock.patch("torch.optim.AdamW", MomentumSGD):
        train(**TINY, dataset=tokens, out_dir=out_dir)
        newest = shutil.ignore_patterns("ckpt-00000008.pt")
        shutil.copytree(out_dir, halves, ignore=newest)
        train(**TINY, dataset=tokens, out_dir=halves, init_from="resume")
    losses = Run(out_dir).steps("loss")
    assert losses[-1] < losses[0] - 0.005
    assert_same_run(halves, out_dir, 8)


# -----------------------------------------------------------------------------
# Changed models

# eager code in the place of compiled code
UNCOMPILED = {"train.py": "torch.compile = lambda call: call\n"}
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


def test_a_models_own_random_numbers_and_buffers_are_seeded_saved_and_resumed(tokens, tmp_path):
    """Change neither when compiled code is compared with eager code."""
    program = changed(tmp_path / "program", NOISY | UNCOMPILED)
    keys = dict(dropout=0.1, dataset=tokens)
    compiled = training(**keys, out_dir="compiled", compile=True)
    first, *results = resumed(program, compiled, **keys)
    assert all(not r.code and "warning" not in r.err for r in (first, *results)), results
    assert_same_run(program / "whole", program / "compiled", 8)
    weights = Run(program / "whole").state(8)["model"]
    assert weights["transformer.h.0.mlp.calls"] == 8 * 2  # micro-batches
    assert weights["transformer.h.0.mlp.mask"][0, 1] == float("-inf")


# counts its calls in a number that no checkpoint has
FORGETFUL = {
    "model.py": """
plain_forward = MLP.forward

def forward(self, x):
    self.calls = getattr(self, "calls", 0) + self.training
    return plain_forward(self, x) * (1 + self.calls / 1000)

MLP.forward = forward
"""
}


@pytest.mark.slow
@pytest.mark.parametrize("changes, code", [(NOISY, 0), (FORGETFUL, 1)])
def test_same_run_says_whether_a_changed_program_resumes_exactly(
    changes, code, tokens, tmp_path, monkeypatch, capsys
):
    same_run = importlib.import_module("dev.same_run")
    monkeypatch.setattr(same_run, "ROOT", changed(tmp_path / "program", changes))
    words = training(dataset=tokens, max_iters=6)[1:]
    assert same_run.main(["--", *words]) == code
    assert ("NOT equal" in capsys.readouterr().out) == bool(code)


# -----------------------------------------------------------------------------
# The experiments of docs/hacking.md: blocks of code that begin with the name of a file

PAGE = (ROOT / "docs/hacking.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n# ([\w/]+\.py)\n(.*?)^```$", PAGE, re.M | re.S)
# the indented blocks of the page, in its order
HEAD, READ_TEACHER, TEACH, WRITE, REWARD, SECOND, REFUSE, MIX, NUMBER = re.findall(
    r"^```python\n(    .*?)^```$", PAGE, re.M | re.S
)
(WEIGH,) = re.findall(r"`(return x, y, .*?)`", PAGE)
((ALL, EACH),) = re.findall(r"`(\[windows\])` for `(.*?)`", PAGE)
(SEEDS,) = re.findall(r"begin `run_code` there with `(.*?)` and\n *`(.*?)`", PAGE)
(DOUBLED,) = re.findall(r"`(return self\.tokens_per_iter \* \(last.*?)`", PAGE)


def block(words: str) -> dict[str, str]:
    """Return the page's block of code with these words, by the name of its file."""
    return {file: code for file, code in BLOCKS if words in code}


def members_of(kind: str, *lines: str) -> str:
    """Return code that adds keys or a method to a class."""
    return "\n    ".join([f"class {kind}:", *lines, "\n"])


def above(line: str, code: str, file: str = "train.py") -> tuple[str, str, str]:
    return file, line, code + line


def below(line: str, code: str, file: str = "train.py") -> tuple[str, str, str]:
    return file, line, line + code


DATA = "    data = open_data(c)  # may download the tokens first\n"
SECOND_KEY = members_of("LaunchKeys", 'second: Location = ""')
TEACHER = block("teacher: Any")
TEACHER["configurator.py"] = members_of("LaunchKeys", 'teacher: Location = ""')
TWO_SETS = block("class TwoDatasets:")
TWO_SETS["configurator.py"] = SECOND_KEY + members_of("RunKeys", "first_iters: Positive = 1000")
DOUBLING = members_of(  # at iteration 4
    "Config", "def tokens_between(self, first, last):", f"    {DOUBLED.replace('1000', '4')}"
)
Z = 1e-4
# with a key in place of the number, as the page says
Z_LOSS = block("logsumexp(-1)")["model.py"].replace("1e-4", "config.z_loss")
Z_KEY = "z_loss: float = 0.0"


@pytest.fixture(scope="module")
def documented(tokens, tmp_path_factory) -> tuple[Path, dict[str, Result]]:
    """Run one program with the page's z-loss, second validation set and number of its own."""
    program = tmp_path_factory.mktemp("documented") / "program"
    files = block("def choices(")
    files["model.py"] = Z_LOSS + members_of("GPTConfig", Z_KEY)
    files["configurator.py"] = SECOND_KEY + members_of("TrainingKeys", Z_KEY)
    record = "            log.report_eval(it, measured, complete)\n"
    changed(program, files, [below(DATA, SECOND), above(record, NUMBER)])
    other = write_tokens(program / "other", [700], [300], vocab=77)
    commands = {
        "plain": training(dataset=tokens, out_dir="plain"),
        "nowhere": training(dataset=tokens, out_dir="no", second="nowhere"),
        "other": training(dataset=tokens, out_dir="no", second=other),
        "second": training(dataset=tokens, out_dir="second", second=tokens),
        "z": training(dataset=tokens, out_dir="z", z_loss=2 * Z, loss_chunk=16, max_iters=4),
        "without": training(dataset=tokens, out_dir="z", z_loss=0.0, init_from="resume"),
    }
    results = dict(zip(commands, launches(program, *commands.values()), strict=True))
    for name, result in results.items():
        assert result.code == (1 if name in ("nowhere", "other") else 0), result
    return program, results


def test_the_documented_z_loss_acts_in_training_alone_and_a_resume_may_change_its_key(documented):
    program, _ = documented
    first = [Run(program / name).steps("loss")[0] for name in ("z", "second")]
    # to an untrained model all 128 ids are about equally likely
    assert first[0] - first[1] == pytest.approx(2 * Z * math.log(128) ** 2, rel=0.02)
    evaluated = [Run(program / name).evals("val_loss")[0] for name in ("z", "second")]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)
    assert Run(program / "z").state(8)["config"]["z_loss"] == 0.0
    read_weights(str(program / "z/ckpt-00000004.pt"))  # by this program, which has no such key


def test_the_documented_second_validation_set_is_checked_printed_recorded_and_drawn(documented):
    program, results = documented
    refused(results["nowhere"], "--second=PATH")
    refused(results["other"], "second: ")
    losses = Run(program / "second").evals("train_loss", "val_loss", "second_loss")
    line = "step 8: train loss {:.4f}, val loss {:.4f}, second loss {:.4f}, "
    assert line.format(*losses[-1]) in results["second"].out
    assert all(val == second for _, val, second in losses)
    figure = pytest.importorskip("matplotlib.figure").Figure()
    draw(figure, [[open_run(program / "second")]])
    assert "second loss of second" in figure.axes[0].get_legend_handles_labels()[1]


def test_the_documented_number_is_printed_recorded_and_compared(documented):
    program, results = documented
    (first, *_, last) = Run(program / "second").evals("choices")
    assert {first, last} <= {0.0, 0.5, 1.0}
    assert f", choices {last:.4g}, time " in results["second"].out
    result = run("compare.py", program / "second", program / "plain")
    assert re.search(rf"^last choices +{last:.4g} +[01]", result.out, re.M), result.out


DOCUMENTED = {  # the page's code and edits, the change's keys, and values that a resume refuses
    "a second head": (
        block("self.second_head"),
        [above("        self.init_weights()\n", HEAD, "model.py")],
        {},
        {},
    ),
    "a teacher": (
        TEACHER,
        [
            below(DATA, READ_TEACHER),
            below("    model = make_model(sizes, c.seed, hw, state)\n", TEACH),
        ],
        dict(teacher="before"),
        dict(teacher="before/ckpt-00000004.pt"),
    ),
    "a batch that doubles": ({"configurator.py": DOUBLING}, [], {}, {}),
    "two datasets": (
        TWO_SETS,
        [
            below(DATA, SECOND + REFUSE),
            below("    batches = Batches(data, c, hw.device)\n", MIX),
        ],
        dict(second="other", first_iters=6),
        dict(second="tokens"),
    ),
    "weights of targets": ({}, [("data/loader.py", "return x, y\n", f"{WEIGH}\n")], {}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_change_trains_resumes_exactly_and_refuses_other_data(
    name, tokens, straight, tmp_path
):
    """Two ranks have the losses of one process, and another teacher or dataset is other data."""
    files, edits, keys, others = DOCUMENTED[name]
    program = changed(tmp_path / "program", files, edits)
    shutil.copytree(tokens, program / "data/tokens")
    shutil.copytree(straight, program / "before")
    write_tokens(program / "data/other", [900], [300])
    keys = dict(dataset="tokens", **keys)
    wrong = [training(**keys | {key: other}, out_dir="halves") for key, other in others.items()]
    whole_run, *refusals = resumed(program, *wrong, **keys)
    for result in refusals:
        refused(result, "dataset: ")
    train_ranks(2, cwd=program, **TINY | keys, out_dir="ranks")
    one, two = (Run(program / name) for name in ("whole", "ranks"))
    own = {"a second head": ["second_loss"], "a teacher": ["kl"]}
    for number in ["loss", *own.get(name, [])]:
        assert two.steps(number) == pytest.approx(one.steps(number), rel=1e-4)
    assert two.evals("val_loss") == pytest.approx(one.evals("val_loss"), rel=1e-4)
    # each change acts: on the first iteration's loss, or later on what training reads
    losses = (Run(straight).steps("loss"), one.steps("loss"))
    assert losses[0][-1] != pytest.approx(losses[1][-1], rel=1e-5)
    if name == "a batch that doubles":
        total = 4 * 128 + 4 * 256
        assert one.column("end", "tokens")[-1] == total
        assert f"\nrun: 8 iterations, {total / 1000:.2f}k tokens, " in whole_run.out


DIFFUSION = block("masked / share")
WRITTEN = block("def written(")  # policy gradients
WRITTEN_EDITS = [
    below("        micro_batches = batches.take(it)\n", WRITE),
    above("        batches.read_ahead(it + 1)  # while the device works\n", REWARD),
]


@pytest.mark.slow
@pytest.mark.parametrize("files, edits", [(DIFFUSION, []), (WRITTEN, WRITTEN_EDITS)])
def test_a_documented_change_that_draws_trains_evaluates_and_resumes_exactly(
    files, edits, tokens, tmp_path
):
    """Two ranks draw other numbers than one process, so compare a resume on two with two."""
    program = changed(tmp_path / "program", files, edits)
    keys = dict(dataset=tokens, learning_rate=0.03, batch_size=16)
    evaluation = training(**keys, out_dir="whole", eval_only=True)
    _, evaluated = resumed(program, evaluation, **keys)
    whole, ranks = Run(program / "whole"), Run(program / "ranks")
    assert f"\nval_loss: {whole.evals('val_loss')[-1]:.4f}" in evaluated.out
    keys = TINY | keys | dict(checkpoint_interval=1)
    train_ranks(2, cwd=program, **keys, out_dir="ranks")
    shutil.copytree(ranks.out_dir, program / "again", ignore=LATER)
    train_ranks(2, cwd=program, **keys, out_dir="again")
    assert_same_run(program / "again", ranks.out_dir, 8)
    for ran in (whole, ranks) if edits else ():
        rewards = ran.steps("reward")
        assert sum(rewards[4:]) > 2 * sum(rewards[:4])


# a term that compares the sequences of a batch, and so is not the mean of each sequence's
ACROSS = {
    "model.py": """
of_each = GPT.forward

def forward(self, idx, targets=None):
    loss = of_each(self, idx, targets)
    return loss if targets is None else loss + self.hidden(idx).mean((0, 1)).square().sum()

GPT.forward = forward
"""
}
CHECK = "machine/compile_check.py"
FIRST_LINE = "    device = next(model.parameters()).device\n"
ALL_WINDOWS = (CHECK, EACH, ALL)
SEEDED = above(FIRST_LINE, "".join(f"    {line}\n" for line in SEEDS), CHECK)
EDITED_CHECKS = {
    "a term over the batch": (ACROSS, [ALL_WINDOWS]),
    "random numbers": (DIFFUSION, [ALL_WINDOWS, SEEDED]),
}


@pytest.mark.parametrize("name", EDITED_CHECKS)
def test_a_documented_edit_lets_the_check_of_compiled_code_pass(name, tokens, tmp_path):
    files, edits = EDITED_CHECKS[name]
    command = training(dataset=tokens, max_iters=1, compile=True, out_dir="out")
    (before,) = launches(changed(tmp_path / "before", files | UNCOMPILED), command)
    refused(before, "compile: ")
    (after,) = launches(changed(tmp_path / "after", files | UNCOMPILED, edits), command)
    assert after.code == 0, after.err


@pytest.mark.slow
def test_a_model_that_draws_trains_compiled_with_the_documented_edit(tokens, tmp_path):
    program = changed(tmp_path / "program", DIFFUSION, [ALL_WINDOWS, SEEDED])
    command = training(dataset=tokens, max_iters=1, compile=True, out_dir="out")
    result = finish(start(*command, cwd=program, cold=True), timeout=600)
    assert result.code == 0, result.err
