"""
docs/hacking.md: its diffs fit the last commit, and what they change is alive, in bfloat16 too. Page
and program are those of the last commit: a change beside them fails nothing here, and a change of
the page is tried once it is committed.
"""

import importlib.util
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import plain
import pytest
import torch
from helpers import TINY
from program import ROOT, changed, checkpoint, column, finish, flags, same, start, write_tokens
from torch import Tensor

from dev.same_run import check_out

IN_GIT = (ROOT / ".git").exists()  # not in an unpacked archive, whose files are tried as they are


def committed(name: str) -> str:
    """A file of the last commit."""
    if not IN_GIT:
        return (ROOT / name).read_text("utf-8")
    command = ["git", "show", f"HEAD:{name}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()


PAGE = committed("docs/hacking.md")
NAMES = ("key", "mixture", "documents", "window", "optimizer", "loss", "average", "figure")
NAMES += ("schedule", "ramp")
DIFFS = dict(zip(NAMES, re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S), strict=True))
# two experiments change the same line, as the page says
TOGETHER = [[name for name in NAMES if name != left] for left in ("documents", "window")]
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
    """The program of the last commit, with the named diffs."""
    if IN_GIT:
        check_out("HEAD", folder)
    else:
        changed(folder, {})
    for name in names:
        apply(DIFFS[name], folder)
    return folder


def run(folder: Path, *words) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a script of the copy."""
    return finish(start(*map(str, words), cwd=folder, only_torch=True), timeout=300)


@pytest.fixture
def tokens(tmp_path) -> Path:
    return write_tokens(tmp_path / "tokens", [1000, 500], [700], vocab=64)


@pytest.fixture
def tiny(tokens):
    """tiny(out_dir, **changes) -> the flags of a run of some seconds."""

    def tiny(out_dir: Path, **changes) -> list[str]:
        return flags(**TINY | dict(dataset=tokens, out_dir=out_dir) | changes)

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
def stock(train, tmp_path):
    """stock(**changes) -> the unchanged program's out_dir, trained for as long."""

    def train_stock(**changes) -> Path:
        folder = tmp_path / "stock"
        if not folder.exists():
            copy_program(folder)
        out_dir = folder / f"run{len(list(folder.glob('run*')))}"
        train(folder, out_dir.name, **changes)
        return out_dir

    return train_stock


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
    before = {file: committed(file) for file in files_of(diff)}
    for file, text in before.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    apply(diff, tmp_path)
    assert all((tmp_path / file).read_text() != text for file, text in before.items())
    apply(diff, tmp_path, "-R")
    assert all((tmp_path / file).read_text() == text for file, text in before.items())


@pytest.mark.parametrize("names", TOGETHER, ids=["all but documents", "all but window"])
def test_the_diffs_of_the_page_go_together(names, tmp_path):
    copy_program(tmp_path / "copy", *names)


def test_the_functions_that_the_page_names_are_there():
    files = {*re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE)} - {"idea.py"}
    code = "\n".join(committed(file) for file in files)
    named = {*re.findall(r"`(\w+)\(\)`", PAGE)}
    assert {"get_lr", "take", "save_newest", "report_step"} <= named
    assert [name for name in named if f"def {name}(" not in code] == []


def words_of(page: str, beginning: str) -> str:
    """The one bash block of the page that begins so."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)
    (block,) = [block for block in blocks if block.startswith(beginning)]
    return block


@pytest.mark.slow
def test_the_loop_of_the_page_trains_both_sides_and_ends_with_a_verdict(tokens, tmp_path):
    """With tiny models, two seeds, and some iterations in place of the hours."""
    block = words_of(PAGE, "mkdir -p out")
    script = "config/quickstart.py idea.py --hours=0.083"
    assert script in block
    changes = dict(dataset=tokens, max_iters=4, warmup_iters=1)
    words = shlex.join(flags(**TINY | changes))
    block = block.replace(script, f"idea.py {words}").replace("1 2 3 4", "1 2")
    program = copy_program(tmp_path / "here")
    (program / "zloss.diff").write_text(DIFFS["loss"])
    (program / "swiglu.diff").write_text(DIFFS["key"])
    (program / ".gitignore").write_text("out/\n*.diff\n")
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in WHO}
    environment = os.environ | names | dict(OMP_NUM_THREADS="1")
    environment |= dict(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    setup = "git init -q . && git add . && git commit -qm all\n"
    command = ["bash", "-eu", "-o", "pipefail", "-c", setup + block]
    done = subprocess.run(command, cwd=program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("verdict: ") == 2
    names = ("val_loss", "bits_per_byte", "tokens", "seconds", "mfu", "mem_gib")
    read = {name: re.findall(rf"^{name}: (\S+)$", done.stdout, re.M) for name in names}
    for name, values in read.items():
        # three clones, two seeds; the run prints each line, and then grep does
        assert len(values) == 2 * 3 * 2, name
    # seed 1 of the base, and of the other two
    losses = read["val_loss"][:6:2]
    assert len({*losses}) == 3


WHO = ("NAME", "EMAIL")


# -----------------------------------------------------------------------------
# How weights move, against formulas in float64

# Plain gradient descent in AdamW's place: weights move by the rate times the gradient.
SGD = ("return torch.optim.AdamW(groups, fused=fused)", "return torch.optim.SGD(groups)")
MOVE = dict(dtype="bfloat16", learning_rate=1.0, weight_decay=0.0, grad_clip=0.0, warmup_iters=0)
MOVE |= dict(lr_schedule="constant", max_iters=2, checkpoint_interval=1)
CONFIG = TINY | dict(seed=1337)
# The largest difference between a gradient in bfloat16, which keeps 8 bits of a number, and one in
# float64, as a share of its norm. The gradients of these models are 0.5% apart, sums of many.
ROUNDING = 0.02


def descend(folder: Path) -> Path:
    """The copy with plain gradient descent."""
    text = (folder / "train.py").read_text("utf-8")
    assert text.count(SGD[0]) == 1
    (folder / "train.py").write_text(text.replace(*SGD), "utf-8")
    return folder


def micro_batches(tokens: Path, it: int, sequences: int = 8, config: dict = CONFIG) -> list:
    """The micro-batches of iteration `it`, of as many sequences before it each."""
    windows = plain.shuffled(plain.split(tokens, "train"), config["block_size"], config["seed"])
    rows = [next(windows) for _ in range((it + 1) * sequences)][-sequences:]
    size = config["batch_size"]
    return [np.stack(rows[n : n + size]) for n in range(0, sequences, size)]


Loss = Callable[[plain.Weights, np.ndarray], Tensor]


def plain_loss(w: plain.Weights, rows: np.ndarray) -> Tensor:
    return plain.loss_of(w, CONFIG, rows)


def gradient_of(w: plain.Weights, batches: list, loss: Loss = plain_loss) -> plain.Weights:
    """The gradient of the mean of the micro-batches' losses."""
    mean = sum(loss(w, rows) for rows in batches) / len(batches)
    parts = torch.autograd.grad(mean, [*w.values()], materialize_grads=True)
    return dict(zip(w, parts, strict=True))


def joined(gradient: plain.Weights) -> Tensor:
    return torch.cat([part.flatten() for part in gradient.values()])


def moved(out_dir: Path) -> tuple[plain.Weights, Tensor]:
    """The weights after the first iteration, and by what the second one moved them, negated."""
    before, after = (plain.weights(checkpoint(out_dir, n)["model"]) for n in (1, 2))
    return before, joined({name: (before[name] - after[name]).detach() for name in before})


def difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def seen_in(window: int) -> Callable[[int], Tensor]:
    return lambda T: torch.ones(T, T).tril().triu(1 - window).bool()


def swiglu(w: plain.Weights, name: str, x: Tensor) -> Tensor:
    gate = plain.linear(w, f"{name}.c_gate", x)
    return plain.linear(
        w, f"{name}.c_proj", gate * gate.sigmoid() * plain.linear(w, f"{name}.c_fc", x)
    )


def ungated(w: plain.Weights, name: str, x: Tensor) -> Tensor:
    gate = plain.linear(w, f"{name}.c_gate", x)
    return plain.linear(w, f"{name}.c_proj", gate * plain.linear(w, f"{name}.c_fc", x))


def mixture_loss(balance: float) -> Loss:
    def loss(w: plain.Weights, rows: np.ndarray) -> Tensor:
        imbalances = []
        mlp = plain.mlp

        def mixture(w, name: str, x: Tensor) -> Tensor:
            probs = plain.linear(w, f"{name}.router", x).softmax(-1)
            weight, chosen = probs.max(-1, keepdim=True)
            shares = torch.stack([(chosen == n).double().mean() for n in range(4)])
            imbalances.append(4 * (shares * probs.mean((0, 1))).sum())
            experts = [mlp(w, f"{name}.experts.{n}", x) for n in range(4)]
            return sum(weight * (chosen == n) * y for n, y in enumerate(experts))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain, "mlp", mixture)
            return plain.loss_of(w, CONFIG, rows) + balance * sum(imbalances)

    return loss


def documents_loss(w: plain.Weights, rows: np.ndarray) -> Tensor:
    """Token 0 begins a document; it is no target, and nothing looks back beyond it."""
    block = torch.from_numpy(rows)
    idx, targets = block[:, :-1], block[:, 1:]
    number = (idx == 0).cumsum(1)
    same_document = (number[:, :, None] == number[:, None]).tril()[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "seen", lambda T: same_document)
        logits = plain.logits_of(w, CONFIG, idx)
    losses = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return losses[targets != 0].mean()


def patched_loss(name: str, replacement) -> Loss:
    def loss(w: plain.Weights, rows: np.ndarray) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain, name, replacement)
            return plain.loss_of(w, CONFIG, rows)

    return loss


# The flags, and the loss whose gradient moves the weights
MOVES = dict(
    key=(dict(mlp="swiglu"), patched_loss("mlp", swiglu)),
    mixture=(dict(experts=4, balance=1.0), mixture_loss(1.0)),
    documents=({}, documents_loss),
    window=(dict(window=5), patched_loss("seen", seen_in(5))),
)
# losses that differ by a part of the change, whose gradients are others
OTHERS = dict(
    key=patched_loss("mlp", ungated),
    mixture=mixture_loss(0.0),
    documents=plain_loss,
    window=patched_loss("seen", seen_in(6)),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVES)
def test_in_bfloat16_the_weights_move_by_the_gradient_of_the_change(name, tmp_path, tokens, train):
    changes, loss = MOVES[name]
    folder = descend(copy_program(tmp_path / "copy", name))
    train(folder, "run", **MOVE | changes)
    before, found = moved(folder / "run")
    batches = micro_batches(tokens, 1)
    expected = gradient_of(before, batches, loss)
    assert difference(found, joined(expected)) < ROUNDING
    # and in the layers that the change is about
    other = gradient_of(before, batches, OTHERS[name])
    sizes = [part.numel() for part in expected.values()]
    parts = dict(zip(expected, found.split(sizes), strict=True))
    layers = ".mlp." if name in ("key", "mixture") else ".attn."
    here, there = (
        difference(
            joined({name: parts[name] for name in parts if layers in name}),
            joined({name: gradient[name] for name in parts if layers in name}),
        )
        for gradient in (expected, other)
    )
    assert here < ROUNDING and there > 5 * ROUNDING


@pytest.mark.slow
def test_a_ramped_batch_moves_the_weights_by_its_own_mean(tmp_path, tokens, train, resumes):
    folder = copy_program(tmp_path / "copy", "ramp")
    ramp = dict(batch_ramp=4, gradient_accumulation_steps=4)
    resumes(folder, **ramp)
    sizes = [4 * 16 * n for n in (1, 2, 3, 4, 4, 4, 4, 4)]  # tokens of an iteration
    assert column(folder / "straight", "step", "tokens_after") == np.cumsum(sizes).tolist()
    train(descend(folder), "run", **MOVE | ramp)
    before, found = moved(folder / "run")
    # one micro-batch of four sequences, then two
    windows = plain.shuffled(plain.split(tokens, "train"), 16, CONFIG["seed"])
    rows = np.stack([next(windows) for _ in range(12)])
    assert difference(found, joined(gradient_of(before, [rows[4:]]))) < ROUNDING
    assert difference(found, joined(gradient_of(before, [rows]))) > 3 * ROUNDING


def z_term(w: plain.Weights, rows: np.ndarray) -> Tensor:
    logits = plain.logits_of(w, CONFIG | dict(n_layer=1), torch.from_numpy(rows)[:, :-1])
    return 1e-4 * logits.logsumexp(-1).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "chunked", "compiled"])
def test_in_bfloat16_the_term_of_the_loss_moves_the_weights_by_its_gradient(
    way, tmp_path, tokens, train
):
    """
    Logits' gradients are rounded to 8 bits, in steps far larger than the term. So the change of one
    weight says little. Over all weights it is the term's, unless the term is rounded away.
    """
    flags = dict(plain=dict(loss_chunk="off"), chunked=dict(loss_chunk=64), compiled={})[way]
    flags |= dict(compile="required" if way == "compiled" else False, n_layer=1)
    flags |= dict(batch_size=64, gradient_accumulation_steps=4)
    flags = MOVE | flags | dict(max_iters=1)
    sides = dict(without=[], with_term=["loss"])
    folders = [descend(copy_program(tmp_path / name, *names)) for name, names in sides.items()]
    for folder in folders:
        train(folder, "run", **flags)
    train(folders[0], "start", **flags | dict(learning_rate=0.0, min_lr=0.0))
    start = plain.weights(checkpoint(folders[0] / "start", 1)["model"])
    batches = micro_batches(tokens, 0, 256, CONFIG | dict(batch_size=64))
    term = joined(gradient_of(start, batches, z_term))
    without, with_term = (
        joined(plain.weights(checkpoint(folder / "run", 1)["model"])).detach() for folder in folders
    )
    found = without - with_term  # at a rate of 1
    # rounding moves it by up to 0.11 (measured); a term that is rounded away has 0
    assert (found @ term / term.square().sum()).item() == pytest.approx(1, abs=0.2)
    losses = [first(folder / "run", "step", "loss") for folder in folders]
    expected = sum(z_term(start, rows).item() for rows in batches) / len(batches)
    assert losses[1] - losses[0] == pytest.approx(expected, rel=5e-3)


def load_model(folder: Path, monkeypatch, *names: str):
    """model.py of the last commit with these diffs, as a module."""
    name = "_".join(["model", *names, "of_head"])
    (folder / "model.py").write_text(committed("model.py"), "utf-8")
    for diff in names:
        apply(DIFFS[diff], folder)
    spec = importlib.util.spec_from_file_location(name, folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("cap", [None, 15.0])
@pytest.mark.parametrize("chunk", [0, 256])
def test_a_small_term_is_not_rounded_away_in_bfloat16(chunk, cap, tmp_path, monkeypatch):
    """The head's gradient, with the term less without it, against the term's in float64."""
    torch.manual_seed(0)
    x = torch.randn(64, 64, 32) + 0.5 * torch.randn(32)
    head = (0.02 * torch.randn(128, 32)).requires_grad_()
    targets = torch.randint(128, (64, 64))
    gradients = []
    for names in ([], ["loss"]):
        model = load_model(tmp_path, monkeypatch, *names)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.mean_loss(x, head, targets, chunk, cap)
        gradients.append(torch.autograd.grad(loss, head)[0].double())
    found = gradients[1] - gradients[0]

    weight = head.double().detach().requires_grad_()
    logits = x.double() @ weight.T
    if cap:
        logits = cap * logits / (logits.square() + cap**2).sqrt()
    (term,) = torch.autograd.grad(1e-4 * logits.logsumexp(-1).square().mean(), weight)
    assert ((found * term).sum() / term.square().sum()).item() == pytest.approx(1, abs=0.1)


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
        "has 'swiglu', you asked for 'gelu'": tiny(folder / "run", mlp="gelu", init_from="resume"),
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
    assert code == 2 and "experts: " in err and "has 4, you asked for 2" in err
    code, _, err = run(folder, "convert.py", "ckpt-to-hf", folder / "muon", folder / "hf")
    assert code == 2 and "transformers has no class" in err


@pytest.mark.slow
def test_a_window_samples_as_it_trains_and_resumes(tiny, tmp_path, train, resumes):
    folder = copy_program(tmp_path / "copy", "window")
    resumes(folder, window=5)
    assert_sampled_right(folder, "straight")
    code, _, err = run(folder, "train.py", *tiny(folder / "straight", init_from="resume"))
    assert code == 0, err  # the run's own window
    code, _, err = run(folder, "convert.py", "ckpt-to-hf", folder / "straight", folder / "hf")
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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_average_is_what_is_evaluated_sampled_exported_and_fine_tuned(
    dtype, tiny, tmp_path, train, stock, resumes
):
    folder = copy_program(tmp_path / "copy", "average")
    options = dict(eval_interval=8, checkpoint_interval=1, keep_checkpoints=9, dtype=dtype)
    state = resumes(folder, **options)
    before = checkpoint(folder / "straight", 7)
    for name, average in state["model"].items():
        expected = before["model"][name].lerp(state["raw"][name], 1e-2)
        torch.testing.assert_close(average, expected)
    assert not torch.equal(state["model"]["lm_head.weight"], state["raw"]["lm_head.weight"])
    # the weights that train are those of a run without an average
    assert same(state["raw"], checkpoint(stock(**options, dropout=0.1), 8)["model"])
    assert_sampled_right(folder, "straight")
    # evaluated again, as weights to start from: the loss that the run has logged
    again = dict(init_from=folder / "straight" / "best.pt", eval_only=True, dtype=dtype)
    code, stdout, err = run(folder, "train.py", *tiny(folder / "again", **again))
    assert code == 0, err
    losses = dict(column(folder / "straight", "eval", "iter", "val_loss"))
    assert f"val loss {losses[8]:.4f}" in stdout
    code, _, err = run(folder, "convert.py", "ckpt-to-hf", folder / "straight", folder / "hf")
    assert code == 0, err


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_moves_by_its_rate_and_resumes_bit_for_bit(dtype, tmp_path, tokens, train):
    folder = copy_program(tmp_path / "copy", "optimizer")
    every = dict(checkpoint_interval=1, keep_checkpoints=9, grad_clip=0.0, dtype=dtype)
    train(folder, "steps", **LION, weight_decay=0.0, **every)
    before, after = weights(folder / "steps", 3), weights(folder / "steps", 4)
    lr = dict(column(folder / "steps", "step", "iter", "lr"))[3]
    moved = (after - before).abs()
    # float32 weights of about 1; padded ids have a gradient, too
    assert ((moved - lr).abs() < 1e-6).float().mean() > 0.9
    assert (((moved - lr).abs() < 1e-6) | (moved == 0)).all()
    losses = column(folder / "steps", "eval", "val_loss")
    assert losses[-1] < losses[0] - 0.05
    # in the direction of the mean of gradients, but where rounding decides its sign
    states = [checkpoint(folder / "steps", n) for n in (3, 4)]
    w = plain.weights(states[0]["model"])
    gradient = gradient_of(w, micro_batches(tokens, 3))
    agreed = []
    names = [name for g in states[0]["optimizer"]["param_groups"] for name in g["param_names"]]
    for number, name in enumerate(names):
        mean = states[0]["optimizer"]["state"][number]["exp_avg"].double()
        moved = states[0]["model"][name] - states[1]["model"][name]
        agreed.append((moved.sign() == mean.lerp(gradient[name], 0.1).sign()).flatten())
    assert torch.cat(agreed).double().mean() > 0.98

    train(folder, "straight", **LION, dropout=0.1)
    train(folder, "halves", **LION, dropout=0.1, lr_decay_iters=8, max_iters=4)
    train(folder, "halves", **LION, dropout=0.1, lr_decay_iters=8, init_from="resume")
    straight = checkpoint(folder / "straight", 8)
    assert {*straight["optimizer"]["state"][0]} == {"exp_avg"}
    assert_same_state(straight, checkpoint(folder / "halves", 8))


@pytest.mark.slow
def test_the_term_of_the_loss_acts_in_plain_chunked_and_compiled_training(tmp_path, train, stock):
    folder = copy_program(tmp_path / "copy", "loss")
    ways = dict(plain=dict(), chunked=dict(loss_chunk=16), compiled=dict(compile="required"))
    without = stock(n_layer=1, loss_chunk="off")
    trained = {}
    for way, changes in ways.items():
        train(folder, way, n_layer=1, **dict(loss_chunk="off") | changes)
        trained[way] = weights(folder / way)
        added = first(folder / way, "step", "loss") - first(without, "step", "loss")
        assert added == pytest.approx(AT_FIRST, rel=0.02)
        val_loss = first(folder / way, "eval", "val_loss")
        assert val_loss == pytest.approx(first(without, "eval", "val_loss"), rel=1e-6)
    effect = (trained["plain"] - weights(without)).norm()
    for way in ways:  # rounding is far less
        assert (trained[way] - trained["plain"]).norm() < effect / 20, way


@pytest.mark.slow
@pytest.mark.parametrize("dtype, rel", [("float32", 1e-4), ("bfloat16", 0.02)])
def test_the_figure_is_on_the_line_and_in_the_records(dtype, rel, tmp_path, tokens, train, stock):
    folder = copy_program(tmp_path / "copy", "figure")
    every = dict(checkpoint_interval=1, keep_checkpoints=9, dtype=dtype)
    stdout = train(folder, "run", log_interval=2, **every)
    assert_same_state(checkpoint(folder / "run", 8), checkpoint(stock(dtype=dtype), 8))
    shown = dict(column(folder / "run", "step", "iter", "wte_norm"))
    assert [*shown] == [0, 2, 4, 6, 7]
    for it in (2, 4, 6, 7):
        w = plain.weights(checkpoint(folder / "run", it)["model"])
        gradient = gradient_of(w, micro_batches(tokens, it))["transformer.wte.weight"]
        assert shown[it] == pytest.approx(gradient.norm().item(), rel=rel)
    lines = [line for line in stdout.splitlines() if line.startswith("iter ")]
    printed = [line.partition(", wte_norm ")[2] for line in lines]
    assert printed == [f"{x:.2e}" for x in shown.values()]


@pytest.mark.slow
def test_the_rates_of_the_schedule_are_its_formulas(tmp_path, train):
    folder = copy_program(tmp_path / "copy", "schedule")
    train(folder, "run", **SCHEDULE)
    rates = column(folder / "run", "step", "lr")
    assert rates == pytest.approx(RATES)


@pytest.mark.slow
def test_in_bfloat16_the_weights_move_by_the_rates_of_the_schedule(tmp_path, tokens, train):
    """Plain gradient descent, in the decay."""
    folder = descend(copy_program(tmp_path / "copy", "schedule"))
    every = dict(checkpoint_interval=1, keep_checkpoints=9, dtype="bfloat16", grad_clip=0.0)
    train(folder, "run", **SCHEDULE, **every, weight_decay=0.0)
    before, after = (plain.weights(checkpoint(folder / "run", n)["model"]) for n in (6, 7))
    gradient = joined(gradient_of(before, micro_batches(tokens, 6)))
    move = joined({name: (before[name] - after[name]).detach() for name in before})
    assert (move @ gradient / gradient.square().sum()).item() == pytest.approx(RATES[6], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("together", TOGETHER, ids=["all but documents", "all but window"])
def test_all_experiments_at_once(together, tmp_path, train):
    folder = copy_program(tmp_path / "copy", *together)
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
    others = copy_program(tmp_path / "others", *(name for name in together if name != "loss"))
    train(others, "run", **changes, max_iters=1)
    added = first(steps, "step", "loss") - first(others / "run", "step", "loss")
    assert added == pytest.approx(AT_FIRST, rel=0.02)
