"""
What nanoGPT's users bring along: config files, data folders, checkpoints, and GPT-2's weights to
fine-tune.
"""

import dataclasses
import importlib
import pickle
import re
import time

import numpy as np
import pytest
import torch
from helpers import ROOT, load_newest, records, run_here
from pages import code_blocks
from weights import random_gpt2

import model_fast
import sample
import train
from common.console import UserError
from configurator import Config, load_config
from data.loader import eval_batches
from data.shards import open_dataset
from model import GPT, GPTConfig, generate
from model_fast import config_from_dict
from training import clock, hardware
from training.pretrained import load_pretrained

# nanoGPT's config files use these forms: products, imports, strings made at run time, comments
# after values.
FILES = {
    "train_gpt2": """
wandb_log = True
wandb_project = 'owt'
wandb_run_name='gpt2-124M'
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
eval_iters = 200
log_interval = 10
weight_decay = 1e-1
""",
    "train_shakespeare_char": """
out_dir = 'out-shakespeare-char'
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
""",
    "finetune_shakespeare": """
import time
out_dir = 'out-shakespeare'
eval_interval = 5
eval_iters = 40
wandb_log = False
wandb_project = 'shakespeare'
wandb_run_name = 'ft-' + str(time.time())
dataset = 'shakespeare'
init_from = 'gpt2-xl'
always_save_checkpoint = False
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20
learning_rate = 3e-5
decay_lr = False
""",
    "eval_gpt2": """
batch_size = 8
eval_iters = 500
eval_only = True
wandb_log = False
init_from = 'gpt2'
""",
}


@pytest.mark.parametrize("name", FILES)
def test_config_files_run_unchanged(name, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(FILES[name])
    config = load_config([str(path)])
    if name == "train_gpt2":
        assert config.gradient_accumulation_steps == 40 and config.tracker == "wandb"
        lr = train.get_lr(300_000, config, 0.0, config.learning_rate)
        assert lr == pytest.approx(3.3e-4, rel=0.01)


@pytest.fixture
def char_dataset(tmp_path):
    """data/shakespeare_char as nanoGPT prepares it: headerless files and a pickled table."""
    folder = tmp_path / "data" / "shakespeare_char"
    folder.mkdir(parents=True)
    text = "to be or not to be, that is the question:\n" * 60
    chars = sorted(set(text))
    ids = np.array([chars.index(c) for c in text], dtype=np.uint16)
    ids[:2000].tofile(folder / "train.bin")
    ids[2000:].tofile(folder / "val.bin")
    table = dict(
        vocab_size=len(chars), itos=dict(enumerate(chars)), stoi={c: i for i, c in enumerate(chars)}
    )
    with open(folder / "meta.pkl", "wb") as file:
        pickle.dump(table, file)
    return folder


def test_the_character_run_of_its_readme(char_dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.py").write_text(FILES["train_shakespeare_char"])
    small = "--n_layer=1 --n_embd=48 --block_size=32 --batch_size=8 --device=cpu --compile=False"
    short = "--max_iters=30 --eval_interval=30 --eval_iters=4 --sample_tokens=40"
    assert train.main(["c.py", *small.split(), *short.split()]) == 0
    out = capsys.readouterr().out
    assert "vocabulary 16 -> 128" in out and "step 30:" in out
    sample = out.rpartition("sample 30:\n")[2].partition("checkpoint")[0].strip("\n")
    assert set(sample) <= set("to be or not to be, that is the question:\n")


def test_an_error_costs_its_own_config_no_more_than_ten_minutes(
    char_dataset, tmp_path, monkeypatch
):
    """It saves with an evaluation only, every 2,000 iterations. Ten minutes are 0.1 s here."""
    monkeypatch.chdir(tmp_path)
    assert clock.SAVE_EVERY == 600
    monkeypatch.setattr(clock, "SAVE_EVERY", 0.1)
    path, original, updates = tmp_path / "train_gpt2.py", train.train_step, iter(range(10**6))
    path.write_text(FILES["train_gpt2"].replace("eval_interval = 1000", "eval_interval = 2000"))

    def step(*arguments):
        time.sleep(0.01)  # so that no more than 10 fit
        if next(updates) == 50:
            raise ValueError("an error of the model")
        return original(*arguments)

    monkeypatch.setattr(train, "train_step", step)
    model = "--n_layer=1 --n_embd=48 --n_head=2 --block_size=32 --batch_size=2 --device=cpu"
    small = f"{model} --dtype=float32 --compile=False --gradient_accumulation_steps=1"
    data = "--dataset=shakespeare_char --eval_iters=4 --out_dir=out --tracker=none"
    with pytest.raises(ValueError, match="an error of the model"):
        train.main([str(path), *small.split(), *data.split()])
    assert 50 - 11 <= load_newest(tmp_path / "out")["progress"]["iter_num"] <= 50


def test_fine_tuning_starts_where_transformers_model_stands(dataset, tmp_path):
    """
    init_from a Hugging Face folder: the first validation loss is the one transformers computes on
    the same tokens.
    """
    hf = random_gpt2(tmp_path / "hf", vocab_size=64, n_positions=32)
    options = dict(
        init_from=tmp_path / "hf", max_iters=4, eval_tokens=512, learning_rate=1e-3, dropout=0.1
    )
    assert run_here(dataset, tmp_path / "run", bias=True, **options) == 0
    windows = open_dataset(str(dataset)).val.read_windows([16 * n for n in range(32)], 17)
    block = torch.from_numpy(windows)
    with torch.no_grad():
        logits = hf(block[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), block[:, 1:].flatten()
    ).item()
    evals = records(tmp_path / "run", "eval")
    assert evals[0]["val_loss"] == pytest.approx(expected, abs=1e-5)
    assert evals[-1]["val_loss"] < evals[0]["val_loss"]
    saved = torch.load(tmp_path / "run/ckpt-00000004.pt", weights_only=True)
    # the context was cropped from 32
    assert saved["model_config"]["vocab_size"] == 64 and saved["model_config"]["block_size"] == 16


def test_fine_tuning_resumes_with_the_vocabulary_of_its_checkpoint(dataset, tmp_path):
    """GPT-2's 50257 are not padded to 50304 on the way."""
    random_gpt2(tmp_path / "hf", vocab_size=64)
    options = dict(n_layer=2, n_head=2, n_embd=32, bias=True)
    run_here(dataset, tmp_path / "run", init_from=tmp_path / "hf", max_iters=2, **options)
    assert run_here(dataset, tmp_path / "run", init_from="resume", max_iters=4, **options) == 0


def test_contradicting_the_pretrained_architecture_lists_the_differences(dataset, tmp_path):
    random_gpt2(tmp_path / "hf", vocab_size=64)
    with pytest.raises(UserError) as error:
        changes = dict(block_size=64, n_layer=3, bias=False)
        run_here(dataset, tmp_path / "run", init_from=tmp_path / "hf", **changes)
    (problem,) = error.value.problems
    assert "has block_size 16 (asked for: 64), n_layer 2 (asked for: 3)" in problem
    assert "bias True (asked for: False)" in problem
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_too_small_for_the_data_is_refused(dataset, tmp_path):
    random_gpt2(tmp_path / "hf", vocab_size=40)
    with pytest.raises(UserError, match="only 40"):
        run_here(dataset, tmp_path / "run", init_from=tmp_path / "hf", bias=True)


def test_a_missing_pretrained_model_is_one_line(dataset, tmp_path):
    with pytest.raises(UserError, match="no such file"):
        run_here(dataset, tmp_path / "run", init_from=tmp_path / "nothing.pt")


# -----------------------------------------------------------------------------
# Its folder: out-NAME/ckpt.pt, and the characters in data/NAME/meta.pkl


@pytest.fixture
def nanogpt_folder(char_dataset, tmp_path):
    """A folder of nanoGPT in which a small model of 16 characters was trained."""
    sizes = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, bias=False)
    args = sizes | dict(vocab_size=16, dropout=0.0)
    state = dict(
        model=GPT(GPTConfig(**args)).state_dict(),
        optimizer=dict(state={}, param_groups=[]),
        model_args=args,
        iter_num=2000,
        best_val_loss=torch.tensor(1.4697),
        config=dict(dataset="shakespeare_char", out_dir="out-shakespeare-char"),
    )
    (tmp_path / "out-shakespeare-char").mkdir()
    torch.save(state, tmp_path / "out-shakespeare-char" / "ckpt.pt")
    return tmp_path


SOURCE = "out-shakespeare-char/ckpt.pt of nanoGPT, iteration 2,000, val loss 1.4697"


@pytest.mark.parametrize("given", ["--out_dir={}", "--init_from={}", "--init_from={}/ckpt.pt"])
def test_its_checkpoint_is_sampled_with_the_characters_beside_it(
    given, nanogpt_folder, tmp_path_factory, monkeypatch, script
):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    folder = nanogpt_folder / "out-shakespeare-char"
    short = ("--start=to be", "--num_samples=1", "--max_new_tokens=8", "--device=cpu")
    code, out, err = script(sample.main, given.format(folder), *short)
    assert code == 0 and out.startswith("to be"), "\n".join(err)
    assert err == [f"model: {nanogpt_folder}/{SOURCE}"]


def test_without_its_characters_the_message_says_where_to_put_them(
    nanogpt_folder, monkeypatch, script
):
    monkeypatch.chdir(nanogpt_folder)
    table = nanogpt_folder / "data" / "shakespeare_char" / "meta.pkl"
    table.rename(nanogpt_folder / "kept.pkl")
    flags = ("--out_dir=out-shakespeare-char", "--max_new_tokens=8", "--device=cpu")
    code, _, lines = script(sample.main, *flags)
    assert code == 2
    assert "tokenizer: unknown; copy data/NAME/meta.pkl beside the weights" in lines[-1]
    (nanogpt_folder / "kept.pkl").rename(nanogpt_folder / "out-shakespeare-char" / "meta.pkl")
    assert script(sample.main, *flags)[0] == 0


@pytest.mark.parametrize(
    "init_from",
    [
        "resume",
        "auto",
    ],
)
@pytest.mark.parametrize("name", ["ckpt.pt", "best.pt"])
def test_weights_that_cannot_be_resumed_are_never_started_over(
    init_from, name, nanogpt_folder, monkeypatch
):
    monkeypatch.chdir(nanogpt_folder)
    folder = nanogpt_folder / "out-shakespeare-char"
    (folder / "ckpt.pt").replace(folder / name)
    data = nanogpt_folder / "data" / "shakespeare_char"
    with pytest.raises(UserError) as error:
        run_here(data, folder, init_from=init_from)
    (problem,) = error.value.problems
    assert "another --out_dir" in problem and f"{folder}" in problem
    assert [path.name for path in folder.iterdir()] == [name]  # nothing is written


def test_the_log_says_where_the_weights_came_from(nanogpt_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(nanogpt_folder)
    data, path = tmp_path / "data" / "shakespeare_char", "out-shakespeare-char/ckpt.pt"
    model = dict(n_layer=1, n_head=2, n_embd=16, block_size=16)
    assert run_here(data, tmp_path / "run", init_from=path, max_iters=2, **model) == 0
    assert (
        f"weights: {SOURCE}; iterations and learning rate start from 0" in capsys.readouterr().out
    )
    assert run_here(data, tmp_path / "run", init_from="resume", max_iters=4, **model) == 0
    assert "weights:" not in capsys.readouterr().out
    assert run_here(data, tmp_path / "no", init_from=path, eval_only=True, **model) == 0
    out = capsys.readouterr().out
    assert f"weights: {SOURCE}" in out and "run: " not in out


def test_its_vocabulary_stays_unpadded_and_the_records_say_so(nanogpt_folder, tmp_path):
    data, model = tmp_path / "data" / "shakespeare_char", dict(n_layer=1, n_embd=16)
    model |= dict(init_from=tmp_path / "out-shakespeare-char", block_size=16, max_iters=1)
    with pytest.raises(UserError) as error:
        run_here(data, tmp_path / "run", pad_vocab_multiple=128, **model)
    (problem,) = error.value.problems
    assert "has pad_vocab_multiple 1 (asked for: 128)" in problem
    assert run_here(data, tmp_path / "run", **model) == 0
    state = load_newest(tmp_path / "run")
    assert state["model_config"]["vocab_size"] == state["vocab"] == 16


def test_characters_and_bytes_are_never_mixed(nanogpt_folder, dataset, tmp_path):
    weights = tmp_path / "out-shakespeare-char" / "ckpt.pt"
    model = dict(n_layer=1, n_embd=16, block_size=16)
    with pytest.raises(UserError, match="another tokenizer"):
        run_here(dataset, tmp_path / "run", init_from=weights, **model)


# -----------------------------------------------------------------------------
# Its scripts, with docs/nanogpt_model.py and as docs/from_nanogpt.md says

PAGE = ROOT / "docs" / "from_nanogpt.md"
(SCRIPT,) = code_blocks(PAGE, "python")


@pytest.fixture
def calls(monkeypatch):
    """docs/nanogpt_model.py, as it is beside a script."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("nanogpt_model")


@pytest.fixture
def trained(dataset, tmp_path):
    assert run_here(dataset, tmp_path / "run") == 0
    return tmp_path / "run"


def test_the_script_of_the_page_has_this_programs_loss_and_text(calls, trained, dataset):
    data = open_dataset(str(dataset))
    config = load_config([f"--dataset={dataset}", "--block_size=16", "--batch_size=16"])
    batches = [*eval_batches(data.val, 256, config, torch.device("cpu"), False, 0, 1)]
    ((idx, targets),) = batches
    names = dict(source=trained, idx=idx, targets=targets)
    exec(SCRIPT, names)
    state = load_pretrained(str(trained))
    ours = GPT(config_from_dict(state["model_config"]))
    ours.load_state_dict(state["model"])
    ours.eval()
    with torch.no_grad():
        assert names["loss"].item() == pytest.approx(ours(idx, targets).item(), abs=1e-6)
    last = records(trained, "eval")[-1]
    assert names["loss"].item() == pytest.approx(last["val_loss"], abs=1e-4)
    whole = ours(idx)
    assert torch.equal(names["logits"], whole) and names["nothing"] is None
    torch.testing.assert_close(names["last"], whole[:, [-1]])
    torch.manual_seed(1337)
    GPT(ours.config)  # the script's model is made from the same random numbers
    text = generate(ours, idx, 20, data.vocab, temperature=0.8, top_k=200)
    assert torch.equal(names["text"], text) and text.size(1) == 16 + 20


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_batch_of_two_is_no_pair(rows, calls):
    model = calls.GPT(calls.GPTConfig(8, 12, 1, 2, 16)).eval()
    idx = torch.zeros(rows, 5, dtype=torch.long)
    logits, loss = model(idx)
    assert logits.shape == (rows, 1, 12) and loss is None
    logits, loss = model(idx, idx)
    assert logits.shape == (rows, 5, 12) and loss.dim() == 0
    half = torch.cat((idx[:, :2], torch.full_like(idx[:, 2:], -1)), dim=1)
    expected = torch.nn.functional.cross_entropy(logits[:, :2].flatten(0, 1), half[:, :2].flatten())
    assert model(idx, half)[1].item() == pytest.approx(expected.item(), abs=1e-6)


def test_its_other_calls(calls, tmp_path):
    random_gpt2(tmp_path / "hf")
    model = calls.GPT.from_pretrained(tmp_path / "hf", dict(dropout=0.1))
    assert model.config.dropout == model.transformer.drop.p == 0.1
    idx = torch.randint(128, (2, 8))
    model = calls.GPT.from_pretrained(tmp_path / "hf").eval()
    before, _ = model(idx, idx)
    model.crop_block_size(8)
    with pytest.raises(AssertionError):
        model.crop_block_size(16)
    assert model.config.block_size == 8 and torch.equal(model(idx, idx)[0], before)
    assert model.generate(idx, 4, top_k=None).shape == (2, 12)
    # two layers of 12 C^2 weights and 13 C of biases and norms, the last norm, the tokens
    n = 2 * (12 * 32**2 + 13 * 32) + 2 * 32 + 128 * 32
    assert model.get_num_params() == n and model.get_num_params(False) == n + 8 * 32
    # PaLM's 6 N + 12 L H Q T, of 2 x 8 tokens in a second
    flops = (6 * n + 12 * 2 * 32 * 8) * 16
    assert model.estimate_mfu(2, 1.0) == pytest.approx(flops / 312e12, rel=0.05)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    decays = {group["weight_decay"]: group for group in optimizer.param_groups}
    assert decays.keys() == {0.1, 0.0} and isinstance(optimizer, torch.optim.AdamW)
    assert all(group["lr"] == 1e-3 for group in decays.values())
    assert all(group["betas"] == (0.9, 0.95) for group in decays.values())
    assert {p.dim() for p in decays[0.1]["params"]} == {2}
    assert sum(len(group["params"]) for group in decays.values()) == len([*model.parameters()])
    model(idx, idx)[1].backward()
    optimizer.step()
    assert not torch.equal(model(idx, idx)[0], before)
    assert calls.LayerNorm(4, False).bias is None and calls.LayerNorm(4, bias=True).eps == 1e-5


def test_the_lines_of_its_table_run(trained):
    table = PAGE.read_text(encoding="utf-8").partition("| one line of code |")[2]
    lines = re.findall(r"^\|.*\| `([^`]+)` \|$", table.partition("\n\n")[0], re.MULTILINE)
    assert len(lines) == 11
    idx = torch.randint(64, (3, 8))
    names = dict(idx=idx, targets=idx, source=str(trained), vocab=64, n=4, tokens_per_second=1e5)
    names |= dict(torch=torch, nn=torch.nn, Config=Config, replace=dataclasses.replace)
    names |= dict(GPT=GPT, config_from_dict=config_from_dict, generate=generate)
    names |= vars(hardware) | dict(build_optimizer=train.build_optimizer)
    names |= dict(load_pretrained=load_pretrained)
    loads = next(line for line in lines if "load_state_dict" in line)
    for line in [loads, *lines]:
        exec(line, names)
    assert names["loss"].dim() == 0 and names["logits"].shape == (3, 1, 128)
    assert names["text"].shape == (3, 28) and names["text"].max() < 64
    assert names["state"]["model_config"]["block_size"] == 8


# -----------------------------------------------------------------------------
# Its user's own model.py, with rotary positions: docs/own_model.md

(OWN_MODEL,) = code_blocks(ROOT / "docs" / "own_model.md", "python")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_own_model_of_the_page_trains_resumes_and_samples(
    optimizer, dataset, tmp_path, monkeypatch
):
    line = "from model import GPT, GPTConfig, "
    assert line in (ROOT / "model_fast.py").read_text()  # step 1 takes GPT out of it
    names: dict = {}
    exec(OWN_MODEL, names)
    own = names["GPT"]
    monkeypatch.setattr(model_fast, "GPT", own)
    hardware.count_flops.cache_clear()
    try:
        given = dict(optimizer=optimizer, learning_rate=0.01, dropout=0.1)
        assert run_here(dataset, tmp_path / "a", **given) == 0
        assert run_here(dataset, tmp_path / "b", max_iters=4, lr_decay_iters=8, **given) == 0
        again = dict(init_from="resume", lr_decay_iters=8, max_iters=8)
        assert run_here(dataset, tmp_path / "b", **given, **again) == 0
        whole, resumed = (load_newest(tmp_path / name)["model"] for name in "ab")
        assert "transformer.wpe.weight" not in whole
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
        losses = [record["val_loss"] for record in records(tmp_path / "a", "eval")]
        assert losses[-1] < losses[0]
        state = load_pretrained(str(tmp_path / "a"))
    finally:
        hardware.count_flops.cache_clear()
    model = own(config_from_dict(state["model_config"])).eval()
    model.load_state_dict(state["model"])
    idx = torch.randint(64, (2, 3))
    # beyond the window too; greedy, each id from the whole text before it, without a cache
    expected = idx
    for _ in range(20):
        likeliest = model(expected[:, -16:])[:, -1, :64].argmax(dim=1, keepdim=True)
        expected = torch.cat((expected, likeliest), dim=1)
    assert torch.equal(generate(model, idx, 20, 64, temperature=0.0), expected)
    # positions count: the same tokens in another order are another text
    logits = model(torch.tensor([[5, 9, 7], [9, 5, 7]]))[:, -1]
    assert not torch.allclose(logits[0], logits[1], atol=1e-4)
