"""
Check how the scripts refuse bad input: mistyped or missing arguments, and damaged files.

A row of the tables is a command and one text per expected error; all words of the text must occur
in that error. They are the fix if the error names one, never only words of the command. Each
command exits with code 1, prints only these errors and warnings, and changes no file. The commands
run in a folder with a few good and many bad files, which `world` makes; tiny.py has the keys of
TINY.
"""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from char_dataset import write_letters
from hf_reference import random_gpt2
from program import ROOT, TINY_RUN, run, write_tokens

TINY = TINY_RUN | dict(n_layer=2, dataset="tokens", out_dir="new")
TINY |= dict(max_iters=2, eval_interval=2, eval_tokens=64, peak_tflops=0)

COMMAND_LINE = [
    ("train.py tiny.py --batch_size 4", "--batch_size --key=value", "4 no such config"),
    ("train.py tiny.py --n_layer=0", "--n_layer 1 or more"),
    ("train.py tiny.py --compile=maybe", "--compile True or False 'maybe'"),
    ("train.py tiny.py --out_dir=", "--out_dir path ''"),  # as in --out_dir=$DIR without a DIR
    ("train.py tiny.py --dropout=1", "--dropout below 1"),
    ("train.py tiny.py --optimizer=adam", "optimizer adam adamw"),
    ("train.py tiny.py --tokens_per_iter=100", "tokens_per_iter use 96"),
    (
        "train.py config/fast.py --gradient_accumulation_steps=64",
        "gradient_accumulation_steps 786,432 --batch_size=8 --tokens_per_iter=786432",
    ),
    ("train.py tiny.py --model=fast --tie_weights=True", "--tie_weights=False"),
    ("train.py tiny.py --model=fast --n_embd=36 --n_head=6", "n_head 6 multiple of 4"),
    ("train.py tiny.py --n_layr=2 --batch_size=four", "--n_layer", "whole number, got 'four'"),
    ("train.py tiny.py --n_head=3 --device=gpu", "cuda:N", "n_head divide n_embd"),
    ("train.py nowhere.py", "nowhere.py no such"),
    ("train.py config/gpt124m_4071.py", "gpt124m_4071.py gpt124m_4070.py"),
    ("train.py tiny.py raises.py", "raises.py:2 ZeroDivisionError"),
    ("train.py tiny.py typo.py", "typo.py n_layers n_layer"),
]

DATA = [
    ("train.py tiny.py --dataset=data/no", "prepare_text.py FILE --out=data/no no folder data/no"),
    ("train.py tiny.py --dataset=empty", "train.bin fineweb_train_000001.bin"),
    ("train.py tiny.py --dataset=cut", "train_000002.bin 2,014 prepare"),
    ("train.py tiny.py --dataset=lost_shard", "train_000002.bin No such file"),
    ("train.py tiny.py --dataset=bad_manifest", "manifest.json prepare"),
    ("train.py tiny.py --dataset=evil_meta", "meta.pkl prepare.py"),
    # suggests as many tokens as the run reads, but no more than FineWeb-Edu's sample has
    ("train.py config/gpt124m_4070.py --device=cpu", "prepare_fineweb.py --tokens=10B"),
    ("train.py tiny.py --block_size=512", "--block_size=249"),
]

FOLDERS = [
    ("train.py tiny.py --out_dir=book.txt", "File exists"),
    ("train.py tiny.py --out_dir=damaged_run", "damaged_run: --out_dir"),
    ("train.py tiny.py --out_dir=nanogpt_run", "--init_from=nanogpt_run/ckpt.pt"),
    ("train.py tiny.py --init_from=resume --out_dir=empty", "no checkpoint mounted"),
    ("train.py tiny.py --out_dir=run --dataset=other --max_iters=3", "another"),
    ("train.py tiny.py --out_dir=run --dataset=bad_sha --max_iters=3", "another"),
    ("train.py tiny.py --eval_only=True --out_dir=run --dataset=other", "another"),
    ("train.py tiny.py --init_from=nowhere.pt", "no such file gpt2-medium"),
    ("train.py tiny.py --init_from=evil.pt", "evil.pt not a checkpoint"),
    ("train.py tiny.py --init_from=flipped.pt", "flipped.pt damaged"),
    ("train.py tiny.py --init_from=nan.pt", "nan.pt finite"),
    ("train.py tiny.py --init_from=run --dataset=chars", "(char) (byte)"),
    ("train.py tiny.py --init_from=run --dataset=wide", "dataset 99 61"),
    ("train.py tiny.py --init_from=run --n_layer=3 --n_embd=64", "--n_layer=2", "--n_embd=32"),
]

# each key that weights keep for life, and each that a run keeps, has its own error
SIZES = "--n_layer=3 --n_head=4 --n_embd=64 --bias=True --block_size=32"
OF_A_RUN = "--block_size=8 --pad_vocab_multiple=1 --optimizer=muon --seed=2 --tokens_per_iter=256"
RESUME = "--init_from=resume --out_dir=run --max_iters=3"
FIXED = [
    (
        f"train.py tiny.py --init_from=run {SIZES}",
        "n_layer:",
        "n_head:",
        "n_embd:",
        "block_size:",
        "bias: --n_layer=2 --n_head=2 --n_embd=32 --bias=False --block_size=16 --init_from",
    ),
    (
        f"train.py tiny.py {RESUME} {OF_A_RUN}",
        "seed:",
        "block_size:",
        "pad_vocab_multiple:",
        "optimizer:",
        "tokens_per_iter: --block_size=16 --pad_vocab_multiple=128 --optimizer=adamw --seed=1337",
    ),
    ("train.py tiny.py --init_from=run --model=fast", "model: --model=gpt2"),
    ("train.py tiny.py --init_from=run --tie_weights=False", "tie_weights: --tie_weights=True"),
]

TOOLS = [
    ("sample.py --out_dir=out/nowhere", "no such out_dir,"),
    ("sample.py --out_dir=run --device=cpu --temprature=1", "--temperature"),
    ("sample.py --out_dir=run --device=cpu --start=FILE:nowhere.txt", "No such file"),
    ("sample.py --out_dir=run --num_samples=0 --temperature=-1", "1 or more", "0 or more"),
    ("train.py tiny.py --init_from=lora.pt --out_dir=new", "lora.pt lora_rank=0 model.py"),
    ("bench.py plan tiny.py --gpu=rtx9999", "'rtx9999' machine/gpus.csv"),
    ("bench.py plan tiny.py --gpu=4070 --hours=-1", "hours 0 or more"),
    (
        "bench.py plan tiny.py --peak_tflops=0 --gpu=T4 --dtype=bfloat16",
        "Tesla T4 bfloat16 peak --iter_seconds",
    ),
    ("bench.py plan tiny.py --gpu=4070 --gpus=3", "tokens_per_iter among 3 processes"),
    ("bench.py plan tiny.py --peak_tflops=0", "gpu peak --gpu=NAME --iter_seconds"),
    ("bench.py plan tiny.py --gpu=4070 --init_from=run --n_layer=3", "--n_layer=2"),
    ("compare.py empty", "metrics.jsonl out/quickstart"),
    ("compare.py book.txt", "no iteration out/quickstart"),
    ("train.py tiny.py --out_dir=gone/x", "gone exists"),
    ("convert.py run tokens", "tokens not empty"),
    ("convert.py nan.pt out", "nan.pt wte.weight older"),
    ("sample.py --init_from=page.pt", "page.pt: damaged"),
]
# what model.py does not compute, as transformers saves it; the last changes the weights' shapes
HUB_MODELS = dict(
    activation_function="gelu",
    layer_norm_epsilon=1e-6,
    scale_attn_weights=False,
    scale_attn_by_inverse_layer_idx=True,
    n_inner=64,
)
TOOLS += [
    *((f"sample.py --init_from={key} --device=cpu", f"its {key} is") for key in [*HUB_MODELS][:4]),
    ("sample.py --init_from=n_inner --device=cpu", "c_fc size mismatch"),
    ("sample.py --init_from=llama --device=cpu", "model_type 'llama'"),
    ("train.py tiny.py --init_from=no_weights", "no model.safetensors docs/own_text.md"),
    ("sample.py --init_from=no_tokenizer --device=cpu", "no tokenizer.json docs/own_text.md"),
    ("sample.py --init_from=cut_weights --device=cpu", "not a model Safetensor"),
]

if not torch.cuda.is_available():
    TOOLS += [("train.py tiny.py --device=cuda", "--device=cpu")]
    TOOLS += [("sample.py --out_dir=run --device=cuda", "--device=cpu")]

PREPARATION = [
    ("data/prepare_text.py nowhere.txt --out=out", "nowhere.txt .md"),
    ("data/prepare_fineweb.py --val_fraction=nan --out=out", "val_fraction between 0 and 0.5"),
    ("data/prepare_text.py book.txt --ouput=out", "unrecognized"),
    ("data/prepare_text.py book.txt --out=tokens", "give another --out"),
    ("data/prepare_text.py book.txt --out=chars", "another program --out"),
    ("data/prepare_text.py book.txt --out=book.txt", "File exists"),
    ("data/prepare_fineweb.py --tokens=lots --out=out", "--tokens such as 8 or 10M"),
]


class Evil:
    """Write a file when a careless program unpickles this object."""

    def __reduce__(self):
        return Path.write_text, (Path("evil_was_here"), "!")


def write_folders_of_tokens() -> None:
    write_tokens(Path("tokens"), train=[700, 500], val=[250])
    write_tokens(Path("other"), train=[700, 501], val=[250])
    write_tokens(Path("wide"), train=[700], val=[250], vocab=99)
    for name in ("cut", "lost_shard", "bad_manifest", "bad_sha"):
        shutil.copytree("tokens", name)
    os.truncate("cut/train_000002.bin", 2014)
    Path("lost_shard/train_000002.bin").unlink()
    Path("bad_manifest/manifest.json").write_text('{"tokenizer": ')
    manifest = json.loads(Path("bad_sha/manifest.json").read_text())
    manifest["shards"][1]["sha256"] = "0" * 64
    Path("bad_sha/manifest.json").write_text(json.dumps(manifest))


def write_nanogpts_folders() -> None:
    for name in ("chars", "evil_meta"):
        write_letters(Path(name))
    meta = pickle.loads(Path("chars/meta.pkl").read_bytes())
    Path("evil_meta/meta.pkl").write_bytes(pickle.dumps(meta | dict(stoi=Evil())))


def write_runs() -> None:
    result = run("train.py", "tiny.py", "--out_dir=run")
    assert result.code == 0, result.err
    newest = Path("run/ckpt-00000002.pt").read_bytes()
    for name in ("damaged_run", "nanogpt_run"):
        Path(name).mkdir()
    for name in ("ckpt-00000001.pt", "ckpt-00000002.pt"):
        Path("damaged_run", name).write_bytes(newest[: len(newest) // 2])
    Path("damaged_run/lock").touch()
    torch.save(dict(model_args={}, model={}), "nanogpt_run/ckpt.pt")
    flipped = bytearray(newest)
    flipped[len(newest) // 2] ^= 1
    Path("flipped.pt").write_bytes(flipped)
    state = torch.load("run/ckpt-00000002.pt", weights_only=True)
    state["model"]["transformer.wte.weight"][0, 0] = float("nan")
    torch.save(state, "nan.pt")
    lora = dict(model_config=state["model_config"] | dict(lora_rank=0))  # by another model.py
    torch.save(state | lora, "lora.pt")
    torch.save(Evil(), "evil.pt")
    Path("page.pt").write_text("<!DOCTYPE html><html>404</html>")
    Path("gone").symlink_to("/nowhere/runs")  # on a disk that is not mounted


def write_hub_models() -> None:
    for key, value in HUB_MODELS.items():
        random_gpt2(Path(key), **{key: value})
    for name in ("no_weights", "no_tokenizer", "cut_weights", "llama"):
        random_gpt2(Path(name))
    Path("no_weights/model.safetensors").rename("no_weights/pytorch_model.bin")
    Path("no_tokenizer/tokenizer.json").unlink()
    os.truncate("cut_weights/model.safetensors", 999)
    config = Path("llama/config.json").read_text()
    Path("llama/config.json").write_text(config.replace('"gpt2"', '"llama"'))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Create the folder in which the commands run."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shutil.copytree(ROOT / "config", "config")
        Path("empty").mkdir()
        Path("tiny.py").write_text("".join(f"{key} = {value!r}\n" for key, value in TINY.items()))
        Path("raises.py").write_text("n_layer = 2\nn_head = n_layer / 0\n")
        Path("typo.py").write_text("n_layers = 2\n")
        write_folders_of_tokens()
        write_nanogpts_folders()
        Path("book.txt").write_text("It was a dark and stormy night.\n" * 300)
        write_runs()
        write_hub_models()
    return folder


def listing(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return all paths in a folder, with the size and the time of the last change."""
    stats = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


BAD_STARTS = COMMAND_LINE + DATA + FOLDERS + FIXED + TOOLS + PREPARATION


@pytest.mark.parametrize("row", BAD_STARTS, ids=[row[0] for row in BAD_STARTS])
def test_a_bad_command_prints_one_error_per_problem_and_changes_no_file(row, world, monkeypatch):
    command, *expected = row
    monkeypatch.chdir(world)
    before = listing(world)
    code, out, err = run(*command.split())
    assert code == 1 and (out == "" or out.endswith("holds no checkpoint: a new run begins\n"))
    lines = err.replace("\n    ", " ").splitlines()  # an indented line continues the line before
    assert all(line.isprintable() and line.startswith(("error: ", "warning: ")) for line in lines)
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == len(expected), err
    for words in map(str.split, expected):
        assert any(all(word in line for word in words) for line in errors), (words, err)
        assert not all(word in command for word in words), "asks only for its own command"
    assert listing(world) == before
