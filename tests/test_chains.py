"""
What people do with more than one script: a run and its samples, the quickstart from an empty
folder, nanoGPT's files and scripts, Hugging Face's, and other people's programs that read the log.
"""

import itertools
import json
import math
import pickle
import re
import shutil
import signal
from datetime import datetime
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from program import (
    ROOT,
    assert_same_run,
    changed,
    checkpoint,
    checkpoints,
    column,
    finish,
    flags,
    records,
    run,
    start,
    train,
    wait_for_line,
    write_tokens,
)

from model_fast import build_model, config_from_dict

T = 16  # context
LETTERS = "\n" + "".join(map(chr, range(63, 123)))  # 61 characters, no multiple of 128
TINY = dict(
    n_layer=2,
    n_head=2,
    n_embd=32,
    block_size=T,
    batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    warmup_iters=2,
    max_iters=8,
    eval_interval=4,
    eval_tokens=10 * T,
    device="cpu",
    dtype="float32",
    compile=False,
)
FAST = dict(model="fast", optimizer="muon", value_tables=1, bigram_rows=99)
RULER = "\n---------------\n"


def write_letters(folder: Path) -> Path:
    """A dataset of characters as nanoGPT prepares it."""
    folder.mkdir(parents=True)
    rng = np.random.RandomState(1)
    for split, size in (("train", 1500), ("val", 20 * T + 1)):
        ids = np.cumsum(rng.randint(0, 3, size)) % len(LETTERS)
        ids.astype("<u2").tofile(folder / f"{split}.bin")
    meta = dict(vocab_size=len(LETTERS), itos=dict(enumerate(LETTERS)))
    meta["stoi"] = {letter: i for i, letter in enumerate(LETTERS)}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Path:
    return write_letters(tmp_path_factory.mktemp("data") / "letters")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tokens"
    return write_tokens(folder, train=[700, 37, 500], val=[20 * T + 1])


@pytest.fixture(scope="module")
def gpt2(letters, tmp_path_factory) -> Path:
    """A run of GPT-2 on letters, with biases and a head of its own."""
    out_dir = tmp_path_factory.mktemp("runs") / "gpt2"
    train(**TINY, dataset=letters, out_dir=out_dir, bias=True, tie_weights=False)
    return out_dir


@pytest.fixture(scope="module")
def fast(letters, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("runs") / "fast"
    train(**TINY | FAST | dict(learning_rate=0.025), dataset=letters, out_dir=out_dir)
    return out_dir


def files(folder: Path) -> dict[str, tuple[int, int]]:
    stats = {str(path): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_resume_on_a_folder_of_which_one_file_has_changed_is_refused(split, letters, tmp_path):
    """nanoGPT's own folder, without a manifest; the file has its name and its size."""
    data, out_dir = tmp_path / "letters", tmp_path / "run"
    shutil.copytree(letters, data)
    keys = TINY | dict(dataset=data, out_dir=out_dir, max_iters=2)
    train(**keys)
    before = files(out_dir)
    ids = np.fromfile(data / f"{split}.bin", "<u2")
    ids[::-1].tofile(data / f"{split}.bin")
    result = run("train.py", *flags(**keys | dict(max_iters=4, init_from="resume")))
    assert result.code == 2
    (error,) = result.err.splitlines()
    assert str(data) in error
    assert files(out_dir) == before


# -----------------------------------------------------------------------------
# Samples


def sample(*arguments: str, **more) -> list[str]:
    """The texts that sample.py prints."""
    result = run("sample.py", "--device=cpu", "--dtype=float32", *arguments, **more)
    assert result.code == 0, result.err
    *texts, rest = result.out.split(RULER)
    assert rest.strip("> \n") == ""
    return texts


def write_parrot(run_folder: Path, path: Path, token: int) -> Path:
    """The run's checkpoint with weights that want this token, whatever came before."""
    state = checkpoint(run_folder, 8)
    weights = state["model"]
    weights["transformer.ln_f.weight"].zero_()
    weights["transformer.ln_f.bias"].zero_()
    weights["transformer.ln_f.bias"][0] = 1
    weights["lm_head.weight"].zero_()
    weights["lm_head.weight"][token, 0] = 100
    torch.save(state, path)
    return path


def greedy_without_cache(state: dict, text: str, n: int) -> str:
    """The text and the n likeliest letters after it, each from a forward pass of the window."""
    model = build_model(config_from_dict(state["model_config"])).eval()
    model.load_state_dict(state["model"])
    idx = [LETTERS.index(letter) for letter in text]
    with torch.no_grad():
        for _ in range(n):
            logits = model(torch.tensor([idx[-T:]]))[0, -1, : len(LETTERS)]
            idx.append(int(logits.argmax()))
    return "".join(LETTERS[i] for i in idx)


def test_the_padding_of_the_vocabulary_is_never_drawn_though_the_model_wants_it(gpt2, tmp_path):
    weights = checkpoint(gpt2, 8)["model"]["lm_head.weight"]
    assert len(weights) == 128 > len(LETTERS)
    parrot = write_parrot(gpt2, tmp_path / "parrot.pt", token=100)
    for temperature in (0, 1, 5):
        arguments = ("--start=a", "--max_new_tokens=40", "--num_samples=3")
        for text in sample(f"--init_from={parrot}", f"--temperature={temperature}", *arguments):
            assert len(text) == 41
            assert set(text) <= set(LETTERS)


def test_the_same_seed_gives_the_same_text_and_another_seed_another(gpt2):
    arguments = (f"--out_dir={gpt2}", "--start=abc", "--max_new_tokens=30", "--num_samples=3")
    texts = sample(*arguments)
    assert [text[:3] for text in texts] == ["abc"] * 3
    assert len(set(texts)) == 3
    assert sample(*arguments) == texts
    assert sample(*arguments, "--seed=1") != texts


def test_of_a_run_the_best_model_is_sampled_and_else_the_newest(gpt2, tmp_path):
    shutil.copytree(gpt2, tmp_path / "run")
    (tmp_path / "run" / "best.pt").unlink()  # a link to ckpt-00000008.pt, perhaps
    arguments = ("--start=a", "--max_new_tokens=5", "--num_samples=1", "--temperature=0")
    newest = sample(f"--out_dir={tmp_path / 'run'}", *arguments)
    write_parrot(gpt2, tmp_path / "run" / "best.pt", token=LETTERS.index("x"))
    assert newest != ["axxxxx"]
    assert sample(f"--out_dir={tmp_path / 'run'}", *arguments) == ["axxxxx"]
    file = tmp_path / "run" / "ckpt-00000008.pt"
    assert sample(f"--init_from={file}", *arguments) == newest


def test_of_a_run_the_best_model_is_exported(gpt2, tmp_path):
    shutil.copytree(gpt2, tmp_path / "run")
    (tmp_path / "run" / "best.pt").unlink()
    write_parrot(gpt2, tmp_path / "run" / "best.pt", token=LETTERS.index("x"))
    result = run("convert.py", "ckpt-to-hf", tmp_path / "run", tmp_path / "hf")
    assert result.code == 0, result.err
    arguments = ("--start=a", "--max_new_tokens=5", "--num_samples=1", "--temperature=0")
    assert sample(f"--init_from={tmp_path / 'hf'}", *arguments) == ["axxxxx"]


@pytest.mark.parametrize("name", ["gpt2", "fast"])
@pytest.mark.parametrize("prompt", ["a", "abc", LETTERS[1 : T + 1], LETTERS[1 : 2 * T]])
def test_the_cached_text_is_the_text_without_the_cache(name, prompt, request):
    """Up to the context's end, and beyond it."""
    run_folder = request.getfixturevalue(name)
    n = 2 * T + 3
    arguments = ("--temperature=0", f"--start={prompt}", f"--max_new_tokens={n}", "--num_samples=2")
    expected = greedy_without_cache(checkpoint(run_folder, 8), prompt, n)
    assert sample(f"--init_from={run_folder}/ckpt-00000008.pt", *arguments) == [expected] * 2


def test_the_likeliest_token_is_drawn_at_temperature_0_and_top_k_1_and_a_tiny_top_p(gpt2):
    arguments = (f"--out_dir={gpt2}", "--start=abc", "--max_new_tokens=20", "--num_samples=2")
    texts = sample(*arguments, "--temperature=0")
    assert texts[0] == texts[1]
    for flag in ("--top_k=1", "--top_p=1e-9"):
        assert sample(*arguments, "--temperature=2", flag) == texts
    assert sample(*arguments, "--temperature=2") != texts


def test_top_p_keeps_the_fewest_tokens_that_have_this_probability(gpt2, tmp_path):
    """A model that wants a, b, c with probabilities 0.6, 0.3, 0.1 in every place."""
    path = write_parrot(gpt2, tmp_path / "three.pt", token=0)
    state = torch.load(path, weights_only=True)
    head = state["model"]["lm_head.weight"]
    head.fill_(0)
    head[:, 0] = -100
    for letter, probability in (("a", 0.6), ("b", 0.3), ("c", 0.1)):
        head[LETTERS.index(letter), 0] = math.log(probability)
    torch.save(state, path)
    arguments = (f"--init_from={path}", "--start=z", "--max_new_tokens=200", "--num_samples=1")
    for top_p, kept in ((0.5, "a"), (0.7, "ab"), (0.95, "abc"), (1, "abc")):
        (text,) = sample(*arguments, "--temperature=1", "--top_k=0", f"--top_p={top_p}")
        assert set(text[1:]) == set(kept)
        if len(kept) == 2:  # 2 : 1; five standard deviations of 200 draws
            assert abs(text.count("a") / 200 - 2 / 3) < 5 * math.sqrt(2 / 9 / 200)


def test_typed_prompts_are_answered_once_each_until_an_empty_line(gpt2):
    arguments = (f"--out_dir={gpt2}", "--max_new_tokens=20")
    texts = sample(*arguments, typed="abc\nxyz\nabc\n\nnot read\n")
    assert [text[:5] for text in texts] == ["> abc", "> xyz", "> abc"]
    assert texts[0] != texts[2]  # asked again, it says something else
    assert len(sample(*arguments, typed="abc\n")) == 1  # the end of the input
    # a --start is the only prompt
    (text, *_) = sample(*arguments, "--start=abc", typed="xyz\n")
    assert text.startswith("abc")


def test_without_a_terminal_ten_samples_are_printed_and_nothing_is_read(gpt2):
    # reading from pytest's stdin raises an error
    assert len(sample(f"--out_dir={gpt2}", "--max_new_tokens=2")) == 10


def test_a_prompt_may_come_from_a_file_and_be_longer_than_the_context(gpt2, tmp_path):
    (tmp_path / "prompt.txt").write_text(LETTERS[1:])
    arguments = ("--num_samples=1", "--max_new_tokens=3", "--device=cpu")
    start_flag = f"--start=FILE:{tmp_path / 'prompt.txt'}"
    result = run("sample.py", f"--out_dir={gpt2}", start_flag, *arguments)
    assert result.out.startswith(LETTERS[1:])
    assert f"last {T}" in result.err


def test_unknown_characters_of_a_prompt_are_left_out_and_named(gpt2):
    arguments = ("--num_samples=1", "--max_new_tokens=3", "--device=cpu")
    result = run("sample.py", f"--out_dir={gpt2}", "--start=a!b", *arguments)
    assert result.out.startswith("ab")
    assert "'!'" in result.err


def test_a_sample_ends_at_the_end_of_text(tokens, tmp_path):
    train(**TINY, dataset=tokens, out_dir=tmp_path / "run", bias=True, tie_weights=False)
    for token, text in ((0, "The end"), (ord("."), "The end.....")):
        parrot = write_parrot(tmp_path / "run", tmp_path / f"{token}.pt", token)
        flags = ("--start=The end", "--max_new_tokens=5", "--num_samples=2", "--temperature=0")
        assert sample(f"--init_from={parrot}", *flags) == [text] * 2


# -----------------------------------------------------------------------------
# From an empty folder

OFFLINE = """
import socket

def connect(self, address):
    if self.family != socket.AF_UNIX:
        open("network_was_asked", "a").write(f"{address}\\n")
        raise OSError(101, "Network is unreachable")
    return original(self, address)

original = socket.socket.connect
socket.socket.connect = connect
"""


RUN_SCRIPT = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = ""
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_quickstart_from_an_empty_folder_without_a_network(tmp_path):
    """As a person does it after the installation, the first command in a fresh Python."""
    home = changed(tmp_path / "nightshift", {})
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OFFLINE)

    def begin(*arguments: str):
        return start("-c", OFFLINE + RUN_SCRIPT, *arguments, cwd=home, only_torch=True)

    def end(process) -> str:
        result = finish(process, timeout=300)
        assert result.code == 0, result.err
        assert "Traceback" not in result.err
        return result.out

    run_folder = home / "out" / "quickstart"
    shorter = ("--max_iters=30", "--eval_interval=30", "--warmup_iters=3", "--log_interval=10")
    shorter += ("--eval_tokens=4096",)
    fresh = dict(cwd=home, cold=True, PYTHONPATH=str(tmp_path / "site"))
    out = end(start("train.py", "config/quickstart.py", *shorter, **fresh))
    assert "sample 30:" in out
    losses = column(run_folder, "eval", "val_loss")
    assert losses[0] == pytest.approx(math.log(256), abs=0.4)  # docs/training.md
    assert losses[1] < losses[0] - 1

    greedy = ("--start=def ", "--temperature=0", "--num_samples=1", "--max_new_tokens=20")
    greedy += ("--device=cpu", "--dtype=float32")
    first = [
        begin("sample.py", "config/quickstart.py", *greedy),
        begin("compare.py", "out/quickstart", "--json=table.json"),
        begin("convert.py", "ckpt-to-hf", "out/quickstart", "hf"),
        begin("bench.py", "plan", "config/quickstart.py", "--from_run=out/quickstart"),
    ]
    text, table, _, plan = map(end, first)
    assert (run_folder / "loss.png").exists()
    assert text.startswith("def ")
    assert f"{losses[1]:.4f}" in table
    (figures,) = json.loads((home / "table.json").read_text())["runs"].values()
    assert figures["best_val_loss"] == losses[1]
    assert figures["iterations"] == 30
    assert f"{1500 * 32 * 64:,}" in plan

    end(begin("convert.py", "hf-to-ckpt", "hf", "back.pt"))
    assert end(begin("sample.py", "--init_from=back.pt", *greedy)) == text
    assert not (home / "network_was_asked").exists()


# -----------------------------------------------------------------------------
# nanoGPT's files

# the form of nanoGPT's own config files: products, imports, strings made at run time
NANOGPTS_CONFIG = """
import time
out_dir = 'out-letters'
eval_interval = 4 # often, because this overfits
eval_iters = 5
log_interval = 1
always_save_checkpoint = False
wandb_log = False # override via command line if you like
wandb_project = 'letters'
wandb_run_name = 'mini-' + str(time.time())
dataset = 'letters'
gradient_accumulation_steps = 1 * 2
batch_size = 4
block_size = 16
n_layer = 2
n_head = 2
n_embd = 32
dropout = 0.2
learning_rate = 1e-2
max_iters = 8
lr_decay_iters = 8 # make equal to max_iters usually
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 2
device = 'cpu'
compile = False
dtype = 'float32'
"""


def write_nanogpts_checkpoint(path: Path) -> Path:
    """As nanoGPT saves it, of a compiled model."""
    sizes = dict(n_layer=2, n_head=2, n_embd=32, block_size=T, bias=False, vocab_size=len(LETTERS))
    generator = torch.Generator().manual_seed(0)
    C = 32
    shapes = {"transformer.wte.weight": (len(LETTERS), C), "transformer.wpe.weight": (T, C)}
    for layer in range(2):
        block = f"transformer.h.{layer}"
        shapes |= {f"{block}.ln_1.weight": (C,), f"{block}.ln_2.weight": (C,)}
        shapes |= {f"{block}.attn.c_attn.weight": (3 * C, C), f"{block}.attn.c_proj.weight": (C, C)}
        shapes |= {f"{block}.mlp.c_fc.weight": (4 * C, C), f"{block}.mlp.c_proj.weight": (C, 4 * C)}
    shapes["transformer.ln_f.weight"] = (C,)
    weights = {}
    for name, shape in shapes.items():
        weight = 0.2 * torch.randn(shape, generator=generator)
        weights[f"_orig_mod.{name}"] = weight + (len(shape) == 1)  # norms around 1
    weights["_orig_mod.lm_head.weight"] = weights["_orig_mod.transformer.wte.weight"]
    state = dict(model=weights, optimizer={}, model_args=sizes | dict(dropout=0.0), iter_num=500)
    state |= dict(best_val_loss=torch.tensor(2.5), config=dict(dataset="letters"))
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    return path


def loss_by_transformers(folder: Path, ids: np.ndarray) -> float:
    """The mean loss of an exported model over whole windows of T tokens."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    count = (len(ids) - 1) // T
    windows = torch.from_numpy(ids.astype(np.int64))
    x = windows[: count * T].view(count, T)
    y = windows[1 : count * T + 1].view(count, T)
    with torch.no_grad():
        logits = model(x).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()


def evaluation_in(out: str) -> float:
    (loss,) = re.findall(r"^step \d+: train loss [\d.]+, val loss ([\d.]+)", out, re.MULTILINE)
    return float(loss)


def test_nanogpts_config_and_data_folder_train_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_letters(Path("data/letters"))
    Path("letters.py").write_text(NANOGPTS_CONFIG)
    result = run("train.py", "letters.py")
    assert result.code == 0, result.err
    run_folder = Path("out-letters")
    (config,) = column(run_folder, "start", "config")
    assert config["tracker"] == "none"
    assert config["dropout"] == 0.2
    assert [record["iter"] for record in records(run_folder, "eval")] == [0, 4, 8]
    # one letter, one byte
    assert column(run_folder, "start", "tokenizer")[0].startswith("char")
    (text,) = sample("letters.py", "--start=abc", "--num_samples=1", "--max_new_tokens=9")
    assert text.startswith("abc")
    assert set(text) <= set(LETTERS)


def test_nanogpts_checkpoint_is_sampled_converted_evaluated_and_trained_further(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    data = write_letters(Path("nanoGPT/data/letters"))
    ckpt = write_nanogpts_checkpoint(Path("nanoGPT/out-letters/ckpt.pt"))
    Path("letters.py").write_text(NANOGPTS_CONFIG)
    greedy = ("--start=abc", "--temperature=0", "--num_samples=1", "--max_new_tokens=20")
    text = sample("--out_dir=nanoGPT/out-letters", *greedy)

    assert run("convert.py", "nanogpt-to-ckpt", ckpt, "new.pt").code == 0
    assert sample("--init_from=new.pt", *greedy) == text
    assert run("convert.py", "ckpt-to-hf", "new.pt", "hf").code == 0
    expected = loss_by_transformers(Path("hf"), np.fromfile(data / "val.bin", "<u2"))

    before = files(tmp_path)
    where = (f"--dataset={data}", f"--init_from={ckpt}", "--out_dir=tuned")
    evaluation = ("--eval_only=True", f"--eval_tokens={20 * T}")
    result = run("train.py", "letters.py", *where, *evaluation)
    assert result.code == 0, result.err
    # nanoGPT's GELU, which is not transformers', moves the loss by less than this: the program
    # computes GPT-2's
    assert evaluation_in(result.out) == pytest.approx(expected, abs=1e-4)
    assert files(tmp_path) == before  # an evaluation writes nothing

    result = run("train.py", "letters.py", *where)
    assert result.code == 0, result.err
    losses = column(Path("tuned"), "eval", "val_loss")
    assert losses[-1] < losses[0] - 0.5
    state = checkpoint(Path("tuned"), 8)["model"]
    assert len(state["transformer.wte.weight"]) == len(LETTERS)  # new rows would be noise


# -----------------------------------------------------------------------------
# Hugging Face's folders, and other runs' weights


def test_a_hugging_face_model_is_evaluated_trained_and_exported(tokens, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(n_positions=2 * T, n_layer=2, n_head=2, n_embd=32, vocab_size=61)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "hf")
    val = np.fromfile(tokens / "val_000000.bin", "<u2")[512:]
    before = loss_by_transformers(tmp_path / "hf", val)

    # the sizes come from the weights, but for a shorter context
    names = ("n_layer", "n_head", "n_embd")
    given = {name: value for name, value in TINY.items() if name not in names}
    given |= dict(dataset=tokens, init_from=tmp_path / "hf", eval_tokens=20 * T)
    result = train(**given, out_dir=tmp_path / "none", eval_only=True)
    assert evaluation_in(result.out) == pytest.approx(before, abs=1e-4)
    assert not (tmp_path / "none").exists()

    train(**given, out_dir=tmp_path / "tuned")
    losses = column(tmp_path / "tuned", "eval", "val_loss")
    assert losses[0] == pytest.approx(before, abs=1e-5)
    assert losses[-1] < before - 0.5
    result = run("convert.py", "ckpt-to-hf", tmp_path / "tuned", tmp_path / "tuned-hf")
    assert result.code == 0, result.err
    # the model of the best evaluation; float32, in another order of additions
    after = loss_by_transformers(tmp_path / "tuned-hf", val)
    assert after == pytest.approx(min(losses), abs=1e-5)


def test_a_new_run_begins_with_the_weights_of_another_run(gpt2, letters, tmp_path):
    other = write_letters(tmp_path / "other")
    given = TINY | dict(learning_rate=1e-3, dropout=0.1, max_iters=4)
    before = files(gpt2)
    train(**given, dataset=other, init_from=gpt2, out_dir=tmp_path / "tuned")
    assert column(tmp_path / "tuned", "eval", "iter") == [0, 4]
    assert column(tmp_path / "tuned", "step", "lr")[0] < 1e-3  # warms up again
    newest = column(gpt2, "eval", "val_loss")[-1]
    assert column(tmp_path / "tuned", "eval", "val_loss")[0] == pytest.approx(newest, abs=1e-6)
    assert checkpoint(tmp_path / "tuned", 4)["optimizer"]["state"][0]["step"] == 4
    assert files(gpt2) == before
    # and is resumed like any other
    given |= dict(max_iters=6)
    train(**given, dataset=other, init_from="resume", out_dir=tmp_path / "tuned")
    assert checkpoints(tmp_path / "tuned") == [4, 6]


# -----------------------------------------------------------------------------
# Exit codes


def test_a_signal_ends_a_run_with_128_and_its_number_and_the_printed_line_continues_it(
    tokens, tmp_path
):
    arguments = flags(**TINY | dict(max_iters=10**6), dataset=tokens, out_dir=tmp_path / "run")
    process = start(str(ROOT / "train.py"), *arguments, cwd=tmp_path)
    wait_for_line(process, "iter 3:")
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code == 128 + signal.SIGINT, result.err
    assert column(tmp_path / "run", "end", "reason") == ["SIGINT"]
    assert "second signal" in result.out + result.err  # and what it would cost
    (saved,) = column(tmp_path / "run", "end", "iters")
    assert checkpoints(tmp_path / "run")[-1] == saved
    (line,) = re.findall(r"^to continue: python (.*)$", result.out, re.MULTILINE)
    script, *again = line.split()
    result = finish(start(script, *again, f"--max_iters={saved + 2}", cwd=tmp_path))
    assert result.code == 0, result.err
    assert column(tmp_path / "run", "step", "iter") == [*range(saved + 2)]


def test_a_run_that_is_done_exits_with_0_and_again_when_it_is_asked_again(tokens, tmp_path):
    arguments = dict(TINY, dataset=tokens, out_dir=tmp_path / "run", init_from="auto")
    train(**arguments)
    before = files(tmp_path)
    result = train(**arguments)
    assert files(tmp_path) == before
    assert "iterations are done" in result.out


def test_a_run_that_fails_exits_with_1_and_one_line_and_has_saved_no_broken_weights(
    tokens, tmp_path
):
    changes = dict(learning_rate=1e38, grad_clip=0, warmup_iters=0, max_iters=60, eval_interval=60)
    changes |= dict(checkpoint_interval=1)
    arguments = flags(**TINY | changes, dataset=tokens, out_dir=tmp_path / "run")
    result = run("train.py", *arguments)
    assert result.code == 1
    lines = result.err.splitlines()
    assert [line.startswith("error: ") for line in lines].count(True) == 1
    assert "Traceback" not in result.err
    assert "learning_rate" in lines[-1]
    for number in checkpoints(tmp_path / "run"):
        for tensor in checkpoint(tmp_path / "run", number)["model"].values():
            assert tensor.isfinite().all()


# -----------------------------------------------------------------------------
# A run's folder


@pytest.fixture(scope="module")
def eight(tokens, tmp_path_factory) -> Path:
    """A run of eight iterations, with checkpoints after 4 and 8."""
    out_dir = tmp_path_factory.mktemp("runs") / "eight"
    train(**TINY, dataset=tokens, out_dir=out_dir)
    assert checkpoints(out_dir) == [4, 8]
    return out_dir


def test_a_run_that_was_moved_with_its_dataset_goes_on(eight, tokens, tmp_path):
    shutil.copytree(eight, tmp_path / "moved")
    shutil.copytree(tokens, tmp_path / "tokens_moved")
    where = dict(out_dir=tmp_path / "moved", dataset=tmp_path / "tokens_moved")
    train(**TINY | dict(max_iters=10), **where, init_from="resume")
    assert column(tmp_path / "moved", "step", "iter") == [*range(10)]


def test_without_its_newer_checkpoints_a_run_goes_back(eight, tokens, tmp_path):
    shutil.copytree(eight, tmp_path / "run")
    (tmp_path / "run" / "ckpt-00000008.pt").unlink()
    result = train(**TINY, dataset=tokens, out_dir=tmp_path / "run", init_from="resume")
    assert "iter 4:" in result.out
    assert "iter 3:" not in result.out
    assert_same_run(tmp_path / "run", eight, 8)


def test_best_pt_goes_on_under_the_name_of_a_checkpoint(eight, tokens, tmp_path):
    """Where it alone is left."""
    (tmp_path / "run").mkdir()
    shutil.copy(eight / "best.pt", tmp_path / "run" / "ckpt-00000008.pt")
    given = TINY | dict(max_iters=10)
    train(**given, dataset=tokens, out_dir=tmp_path / "run", init_from="resume")
    assert column(tmp_path / "run", "step", "iter") == [8, 9]


def test_a_run_that_still_trains_can_be_sampled_and_compared(letters, tmp_path):
    arguments = flags(**TINY | dict(max_iters=10**6), dataset=letters, out_dir=tmp_path)
    process = start("train.py", *arguments)
    try:
        wait_for_line(process, "checkpoint 4:")
        (text,) = sample(f"--out_dir={tmp_path}", "--start=abc", "--num_samples=1")
        assert text.startswith("abc")
        assert run("compare.py", tmp_path, f"--png={tmp_path / 'so_far.png'}").code == 0
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_eval_iters_are_the_micro_batches_of_an_evaluation(tokens, tmp_path):
    for name, size in (("iters", dict(eval_iters=3)), ("tokens", dict(eval_tokens=3 * 4 * T))):
        given = TINY | dict(eval_tokens=0, max_iters=0) | size
        train(**given, dataset=tokens, out_dir=tmp_path / name)
    losses = [
        column(tmp_path / name, "eval", "train_loss", "val_loss") for name in ("iters", "tokens")
    ]
    assert losses[0] == losses[1]


def test_the_first_words_of_text_in_another_encoding_are_shown(tmp_path):
    text = "Über die Straße ging ein Bär.\n" * 300
    (tmp_path / "book.txt").write_bytes(text.encode("cp1252"))
    arguments = (tmp_path / "book.txt", "--encoding=cp1252", f"--out={tmp_path / 'data'}")
    result = run("data/prepare_text.py", *arguments)
    assert result.code == 0, result.err
    assert "Straße" in result.out + result.err


# -----------------------------------------------------------------------------
# What other programs read

N = r"-?[\d.]+"
ITER = re.compile(rf"^iter (\d+): loss ({N}), time ({N})ms, mfu ({N})%", re.MULTILINE)
STEP = re.compile(rf"^step (\d+): train loss ({N}), val loss ({N})", re.MULTILINE)
FIELDS = dict(
    start="config data_fingerprint device device_type dtype flops_per_token iter parameters"
    " peak_source peak_tflops tokenizer tokens_per_iter torch val_fingerprint"
    " val_text_sha256 val_tokens world_size",
    step="data_wait_ms grad_norm hours iter loss lr mem_gib mfu step_ms tokens tokens_after"
    " tokens_per_sec",
    eval="bits_per_byte hours iter perplexity seconds tokens train_loss val_loss",
    checkpoint="bytes iter path seconds",
    sample="iter text",
    event="iter message",
    end="hours iters ledger reason tokens",
)


@pytest.fixture(scope="module")
def logged(tokens, tmp_path_factory) -> tuple[Path, str]:
    """A run with all kinds of records, and what it printed. It skips the update of iteration 4."""
    out_dir = tmp_path_factory.mktemp("logged") / "run"
    backward = torch.Tensor.backward
    calls = itertools.count()

    def spoilt(loss):
        is_bad = next(calls) == 4 * 2  # two micro-batches an iteration
        backward(loss * torch.nan if is_bad else loss)

    changes = dict(sample_tokens=5, peak_tflops=0.01)
    with mock.patch.object(torch.Tensor, "backward", spoilt):
        result = train(**TINY | changes, dataset=tokens, out_dir=out_dir, log_interval=2)
    return out_dir, result.out


def test_nanogpts_patterns_find_the_numbers_of_the_log(logged):
    out_dir, out = logged
    lines = ITER.findall(out)
    fields = ("iter", "loss", "step_ms", "mfu")
    expected = [
        (str(it), f"{loss:.4f}", f"{ms:.2f}", f"{100 * mfu:.2f}")
        for it, loss, ms, mfu in column(out_dir, "step", *fields)
    ]
    assert lines == expected
    assert [int(line[0]) for line in lines] == [0, 2, 4, 6, 7]
    evaluations = [
        (str(it), f"{train_loss:.4f}", f"{val_loss:.4f}")
        for it, train_loss, val_loss in column(out_dir, "eval", "iter", "train_loss", "val_loss")
    ]
    assert STEP.findall(out) == evaluations
    assert [int(line[0]) for line in evaluations] == [0, 4, 8]
    assert f"tokens per iteration will be: {4 * 2 * T:,}" in out


def test_each_kind_of_record_has_its_fields(logged):
    out_dir, _ = logged
    found: dict[str, set] = {}
    for record in records(out_dir):
        names = frozenset(record) - {"kind", "time"}
        found.setdefault(record["kind"], set()).add(names)
        assert datetime.fromisoformat(record["time"]).tzinfo
    assert found.keys() == FIELDS.keys()
    for kind, sets in found.items():
        (names,) = sets
        assert names == set(FIELDS[kind].split()), kind


def test_log_txt_holds_what_the_console_showed(logged):
    out_dir, out = logged
    lines = (out_dir / "log.txt").read_text().splitlines()
    assert set(ITER.findall(out)) == set(ITER.findall("\n".join(lines)))
    assert set(out.splitlines()) <= set(lines) | {""}


def assert_is_picture(path: Path) -> None:
    from matplotlib.image import imread

    pixels = imread(path)
    assert min(pixels.shape[:2]) > 200
    colours = np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)
    assert len(colours) > 20  # not a blank page


def test_compare_draws_the_picture_of_a_run(gpt2, tmp_path):
    shutil.copytree(gpt2, tmp_path / "run")
    assert run("compare.py", tmp_path / "run").code == 0
    assert_is_picture(tmp_path / "run" / "loss.png")


# -----------------------------------------------------------------------------
# People's own model.py and scripts: docs/own_model.md, docs/from_nanogpt.md


def code_block(page: str) -> str:
    """The first block of Python on a page."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return text.partition("```python\n")[2].partition("```")[0]


# step 1 of docs/own_model.md
OWN_MODEL = {
    "model_fast.py": [
        ("from model import GPT, GPTConfig,", "from mine import GPT\nfrom model import GPTConfig,")
    ]
}
# the likeliest letters without a cache
PLAINLY = """
import sys, torch
from mine import GPT
from model_fast import config_from_dict
state = torch.load(sys.argv[1], weights_only=True)
model = GPT(config_from_dict(state["model_config"])).eval()
model.load_state_dict(state["model"])
idx = [int(id) for id in sys.argv[2].split(",")]
with torch.no_grad():
    for _ in range(40):
        idx.append(int(model(torch.tensor([idx[-16:]]))[0, -1, :61].argmax()))
print(idx)
"""


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_the_own_model_of_the_page_trains_resumes_and_samples(optimizer, letters, tmp_path):
    home = changed(tmp_path / "copy", OWN_MODEL)
    (home / "mine.py").write_text(code_block("own_model.md"))

    def ran(*arguments: str) -> str:
        result = finish(start(*map(str, arguments), cwd=home, only_torch=True))
        assert result.code == 0, result.err
        return result.out

    given = TINY | dict(dataset=letters, optimizer=optimizer, dropout=0.1, lr_decay_iters=8)
    ran("train.py", *flags(**given, out_dir="straight"))
    ran("train.py", *flags(**given | dict(max_iters=4), out_dir="halves"))
    ran("train.py", *flags(**given, out_dir="halves", init_from="resume"))
    whole, halves = (checkpoint(home / name, 8) for name in ("straight", "halves"))
    assert "transformer.wpe.weight" not in whole["model"]  # its positions are rotary
    for name, weight in whole["model"].items():
        assert torch.equal(weight, halves["model"][name]), name
    losses = column(home / "straight", "eval", "val_loss")
    assert losses[-1] < losses[0] - 0.1

    file = home / "straight" / "ckpt-00000008.pt"
    greedy = ("--temperature=0", "--num_samples=1", "--max_new_tokens=40", "--dtype=float32")
    text = ran("sample.py", f"--init_from={file}", "--start=abc", "--device=cpu", *greedy)
    prompt = ",".join(str(LETTERS.index(letter)) for letter in "abc")
    ids = json.loads(ran("-c", PLAINLY, file, prompt))
    assert text == "".join(LETTERS[i] for i in ids) + RULER


SCRIPT = """
import torch
torch.manual_seed(0)
ids = torch.tensor([*open(r"{val}", "rb").read()[1024:]][::2])
source, idx, targets = r"{source}", ids[:320].view(20, 16), ids[1:321].view(20, 16)
{page}
whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
assert torch.equal(whole, loss) or abs(whole - loss) < 1e-5
assert nothing is None and last.shape == (20, 1, 128)
assert torch.allclose(last, logits[:, [-1]], atol=1e-5)
assert text.shape == (20, 36) and text.max() < 61
optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
model(idx, targets)[1].backward()
optimizer.step()
assert model(idx, targets)[1] < loss
print(loss.item())
"""


@pytest.mark.parametrize("place", ["beside", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_a_script_written_for_nanogpts_model_runs_here(place, tokens, tmp_path):
    train(**TINY | dict(eval_tokens=20 * T), dataset=tokens, out_dir=tmp_path / "run")
    home = changed(tmp_path / "copy", {})
    shutil.copy(ROOT / "docs" / "nanogpt_model.py", home)
    page = code_block("from_nanogpt.md")
    names = dict(val=tokens / "val_000000.bin", source=tmp_path / "run", page=page)
    script = (home if place == "beside" else tmp_path) / "script.py"
    script.write_text(SCRIPT.format(**names))
    way = dict(only_torch=True) if place == "beside" else dict(cold=True, PYTHONPATH=str(home))
    result = finish(start(str(script), cwd=tmp_path, **way))
    assert result.code == 0, result.err
    val_loss = column(tmp_path / "run", "eval", "val_loss")[-1]
    assert float(result.out) == pytest.approx(val_loss, abs=1e-5)


def test_a_typed_prompt_has_as_many_samples_as_are_asked_for(gpt2):
    assert (
        len(sample(f"--out_dir={gpt2}", "--max_new_tokens=5", "--num_samples=3", typed="a\n")) == 3
    )
