"""
Check how the scripts refuse bad input: mistyped or missing arguments, and damaged files.

A row of the tables is a command and one text per expected error; all words of the text must occur
in that error. Each command exits with code 2, prints only these errors and warnings, and changes no
file. The commands run in a folder with a few good and many bad files: see `world`.
"""

import json
import pickle
import shutil
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from fault_injection import watched
from program import ROOT, finish, finish_ranks, flags, run, start, start_ranks, write_tokens

TINY = """
dataset = "tokens"
out_dir = "new"
n_layer = 2
n_head = 2
n_embd = 32
block_size = 16
batch_size = 4
gradient_accumulation_steps = 2
max_iters = 2
eval_interval = 2
eval_tokens = 64
device = "cpu"
dtype = "float32"
compile = False
"""

COMMAND_LINE = [
    ("train.py tiny.py --lr=1e-3", "--lr learning_rate"),
    ("train.py tiny.py --n_layr=2", "--n_layr n_layer"),
    ("train.py tiny.py --resume", "--resume unknown"),
    ("train.py tiny.py --batch_size 4", "--batch_size=4"),
    ("train.py tiny.py --batch_size", "--batch_size needs"),
    ("train.py tiny.py -batch_size=4", "-batch_size --key=value"),
    ("train.py tiny.py batch_size=4", "batch_size=4 --key=value"),
    ("train.py tiny.py --batch_size=four", "--batch_size whole number 'four'"),
    ("train.py tiny.py --batch_size=0", "--batch_size 1 or more"),
    ("train.py tiny.py --compile=maybe", "--compile true or false 'maybe'"),
    ("train.py tiny.py --dropout=1", "--dropout below 1"),
    ("train.py tiny.py --beta2=1", "--beta2 below 1"),
    ("train.py tiny.py --max_iters=1e400", "--max_iters whole number"),
    ("train.py tiny.py --min_lr -1", "--min_lr=-1"),
    ("train.py tiny.py --dataset=", "--dataset empty"),
    ("train.py tiny.py --learning_rate=nan", "--learning_rate finite"),
    ("train.py tiny.py --seed=-1", "--seed -1"),
    ("train.py tiny.py --until=07:00", "until removed --hours"),
    ("train.py tiny.py --max_minutes=60", "max_minutes removed timeout"),
    ("train.py tiny.py --optimizer=adam", "optimizer adam adamw"),
    ("train.py tiny.py --dtype=fp16", "dtype fp16 float16"),
    ("train.py tiny.py --device=gpu", "device gpu cuda"),
    ("train.py tiny.py --device=cuda:x", "device cuda:x"),
    ("train.py tiny.py --device=meta", "device meta"),
    ("train.py tiny.py --loss_chunk=some", "loss_chunk some"),
    ("train.py tiny.py --n_head=3", "n_head 3 n_embd 32"),
    ("train.py tiny.py --tokens_per_iter=100", "tokens_per_iter 100 64 128"),
    ("train.py tiny.py --head_lr=0.1", "head_lr optimizer=muon"),
    ("train.py tiny.py --model=fast --tie_weights=True", "tie_weights"),
    ("train.py tiny.py --model=fast --n_embd=36 --n_head=6", "n_head 6 multiple of 4"),
    ("train.py tiny.py --tokenizer=byte", "tokenizer removed prepares"),
    ("train.py tiny.py removed.py", "removed.py data_workers prepare_fineweb.py"),
    ("train.py tiny.py --n_layr=2 --batch_size=four", "--n_layr", "--batch_size"),
    ("train.py tiny.py --n_head=3 --device=gpu", "device", "n_head"),
    ("train.py nowhere.py", "nowhere.py no such"),
    ("train.py config/gpt124m_4071.py", "gpt124m_4071.py gpt124m_4070.py"),
    ("train.py config/train_gpt2.py", "train_gpt2.py gpt124m"),
    ("train.py book.txt", "book.txt prepare_text.py"),
    ("train.py run", "run no such"),
    ("train.py tiny.py raises.py", "raises.py:2 ZeroDivisionError"),
    ("train.py tiny.py syntax.py", "syntax.py:1 SyntaxError"),
    ("train.py tiny.py typo.py", "typo.py n_layers n_layer"),
    ("train.py tiny.py wrong_type.py", "wrong_type.py batch_size"),
    ("configurator.py tiny.py --n_layr=2", "--n_layr n_layer"),
]

DOWNLOAD = (
    'hf download kjj0/fineweb10B-gpt2 --repo-type=dataset --include="fineweb_*_0000[01]*" '
    "--local-dir="
)
DATA = [
    ("train.py tiny.py --dataset=nowhere", "dataset nowhere prepare_text.py"),
    (f"train.py tiny.py --dataset={'a' * 300}", "File name too long"),
    ("train.py tiny.py --dataset=no\x1b[2Jwhere", r"no\x1b[2Jwhere"),
    ("train.py tiny.py --dataset=my_fineweb", "dataset my_fineweb prepare_fineweb.py"),
    ("train.py tiny.py --dataset=tokens/manifest.json", "dataset manifest.json"),
    ("train.py tiny.py --dataset=empty", "empty train"),
    ("train.py tiny.py --dataset=cut", "train_000002.bin tokens prepare"),
    ("train.py tiny.py --dataset=lost_shard", "train_000002.bin No such file"),
    ("train.py tiny.py --dataset=bad_manifest", "manifest.json prepare"),
    ("train.py tiny.py --dataset=unfinished", "unfinished"),
    ("train.py tiny.py --dataset=evil_meta", "meta.pkl"),
    # suggests as many tokens as the run reads, but no more than FineWeb-Edu's sample has
    ("train.py config/gpt124m_4070.py --device=cpu", "prepare_fineweb.py --tokens=10B"),
    (
        "train.py config/gpt124m_4070.py --device=cpu --hours=8",
        "prepare_fineweb.py --tokens=2B",
    ),
    # the error names README's download if that download has enough tokens for the run
    ("train.py config/fast124m_4070.py --device=cpu", f"{DOWNLOAD}data/fineweb_records"),
    ("train.py config/fast124m_4070.py --device=cpu --hours=8", f"{DOWNLOAD}data/fineweb_records"),
    ("train.py config/fast124m_4070.py --device=cpu --max_iters=6500", "fineweb_*_000*"),
    ("train.py tiny.py --block_size=512", "block_size val 250"),
    ("train.py tiny.py --dataset=short_val", "block_size val 10"),
]

FOLDERS = [
    ("train.py tiny.py --out_dir=run", "run earlier run --init_from=auto"),
    # this command would evaluate random weights, not those of the run
    ("train.py tiny.py --out_dir=run --eval_only=True --init_from=scratch", "run earlier run"),
    ("train.py tiny.py --out_dir=damaged_run", "damaged_run earlier run"),
    ("train.py tiny.py --out_dir=nanogpt_run", "nanogpt_run ckpt.pt --out_dir"),
    ("train.py tiny.py --out_dir=book.txt", "book.txt"),
    ("train.py tiny.py --out_dir=book.txt/new", "book.txt/new"),
    ("train.py tiny.py --init_from=auto --out_dir=damaged_run", "damaged_run 2 checkpoints"),
    ("train.py tiny.py --init_from=auto --out_dir=best_alone", "best.pt --out_dir"),
    # a browser names a second copy like this
    ("train.py tiny.py --init_from=auto --out_dir=downloaded", "ckpt-00000002 (1).pt --out_dir"),
    ("train.py tiny.py --init_from=resume --out_dir=evil_run", "evil_run 1 checkpoints"),
    ("train.py tiny.py --init_from=auto --out_dir=nanogpt_run", "ckpt.pt --out_dir"),
    (
        "train.py tiny.py --init_from=auto --out_dir=run --dataset=other --max_iters=3",
        "dataset run",
    ),
    # another text or model means another run, even if the run in the folder is finished
    ("train.py tiny.py --init_from=auto --out_dir=run --dataset=other", "dataset run --out_dir"),
    ("train.py tiny.py --init_from=auto --out_dir=run --n_layer=3", "n_layer 2 3 --out_dir"),
    (
        "train.py tiny.py --init_from=auto --out_dir=run --dataset=no_manifest --max_iters=3",
        "dataset no_manifest",
    ),
    ("train.py tiny.py --init_from=auto --out_dir=run --dataset=bad_sha --max_iters=3", "bad_sha"),
    ("train.py tiny.py --init_from=nowhere.pt", "nowhere.pt no such"),
    ("train.py tiny.py --init_from=scrath", "scrath scratch"),
    ("train.py tiny.py --init_from=evil.pt", "evil.pt contains getattr run code"),
    ("train.py tiny.py --init_from=unknown.pt", "unknown.pt nanoGPT"),
    ("train.py tiny.py --init_from=cut.pt", "cut.pt damaged"),
    ("train.py tiny.py --init_from=flipped.pt", "flipped.pt damaged"),
    ("train.py tiny.py --init_from=nan.pt", "nan.pt finite"),
    ("train.py tiny.py --init_from=llama", "llama gpt2"),
    ("train.py tiny.py --init_from=run --dataset=chars", "dataset tokenizer char byte"),
    ("train.py tiny.py --init_from=run --dataset=wide", "dataset 99 61"),
    ("train.py tiny.py --init_from=run --n_layer=3", "n_layer 2 3 --init_from"),
    ("train.py tiny.py --init_from=run --n_layer=3 --n_embd=64", "n_layer 2 3", "n_embd 32 64"),
]

# the keys that weights keep for life, each set to something else
ARCHITECTURE = [
    *("model=fast", "n_layer=3", "n_head=4", "n_embd=64", "bias=True", "tie_weights=False"),
    "block_size=32",
]
# and the keys that a run keeps
OF_A_RUN = [*ARCHITECTURE, "block_size=8", "pad_vocab_multiple=1", "optimizer=muon", "seed=2"]
OF_A_RUN += ["stream=True"]

TOOLS = [
    ("sample.py --out_dir=nowhere", "--out_dir=nowhere no such"),
    ("sample.py --out_dir=empty", "--out_dir=empty no checkpoint"),
    ("sample.py --out_dir=.", "--out_dir=. no checkpoint run"),
    ("sample.py --out_dir=run --device=cpu --temprature=1", "--temprature temperature"),
    ("sample.py --out_dir=run --device=cpu --batch_size=4", "--batch_size unknown"),
    ("sample.py --out_dir=run --device=cpu --start=FILE:nowhere.txt", "nowhere.txt"),
    ("sample.py --out_dir=run --num_samples=0 --temperature=-1", "num_samples", "temperature"),
    ("sample.py --init_from=gpt-2", "gpt-2 gpt2"),
    ("sample.py --init_from=evil.pt --device=cpu", "evil.pt"),
    ("bench.py swep", "swep sweep"),
    ("bench.py step tiny.py", "step no such mode"),
    ("bench.py nowhere.py", "nowhere.py no such"),
    ("bench.py tiny.py --batch_sise=4", "batch_sise batch_size"),
    ("bench.py tiny.py --profile=trace.json", "profile removed docs/plan.md"),
    ("bench.py tiny.py --seconds=long", "seconds 'long'"),
    ("bench.py sweep tiny.py --write=tiny.py", "write tiny.py exists"),
    ("bench.py plan tiny.py --gpu=rtx9999", "gpu rtx9999"),
    ("bench.py plan tiny.py --gpu=4070 --gpus=0", "gpus '0'"),
    ("bench.py plan tiny.py --gpu=4070 --hours=-1", "hours -1"),
    ("bench.py plan tiny.py --gpu=3080", "gpu 3080 10GB 12GB"),
    ("bench.py plan tiny.py --gpu=T4 --dtype=bfloat16", "dtype T4 --dtype=float16"),
    ("bench.py plan tiny.py --gpu=b100 --dtype=bfloat16", "gpu peak B100 --iter_seconds"),
    ("bench.py plan tiny.py --gpu=4070 --gpus=3", "gradient_accumulation_steps 3"),
    ("bench.py plan tiny.py --iter_seconds=9 --hours=0.001", "hours iteration"),
    ("bench.py plan tiny.py --gpu=all --watts=200", "gpu --watts one GPU"),
    ("bench.py plan tiny.py --gpu=all --hours=8", "gpu --hours one GPU"),
    ("bench.py plan tiny.py --dataset_tokens=inf", "dataset_tokens 'inf'"),
    ("bench.py plan tiny.py --from_run=run", "from_run removed --iter_seconds"),
    ("bench.py plan tiny.py --iter_seconds=2,0", "iter_seconds 2,0"),
    ("bench.py plan tiny.py --n_embd=2048 --block_size=240", "gpu CPU --gpu=4070 --iter_seconds"),
    ("compare.py", "required"),
    ("compare.py nowhere", "nowhere No such file"),
    ("compare.py empty", "empty metrics.jsonl"),
    ("compare.py book.txt", "book.txt no iteration"),
    ("compare.py console.txt", "console.txt out_dir"),
    ("compare.py run run/metrics.jsonl --pgn=x.png", "--pgn"),
    ("compare.py run --loss=low", "--loss 'low'"),
    ("compare.py old.log --gpu=3080", "gpu 3080 10GB 12GB"),
    ("compare.py old.log --gpu=2070", "gpu 2070 bfloat16 certain"),
    ("sample.py --init_from=gone", "gone no such"),
    ("train.py tiny.py --out_dir=gone/x", "gone exists"),
    ("train.py tiny.py --dataset=./gone", "dataset gone"),
    ("convert.py", "required"),
    ("convert.py ckpt-to-hff run out", "ckpt-to-hff ckpt-to-hf"),
    ("convert.py ckpt-to-hf nowhere out", "nowhere no such"),
    ("convert.py ckpt-to-hf run tokens", "tokens not empty"),
    ("convert.py hf-to-ckpt hf out.pt", "hf-to-ckpt ckpt-to-hf"),  # a mode of version 0.2
    ("convert.py ckpt-to-hf nan.pt out", "nan.pt wte.weight finite"),
    ("convert.py ckpt-to-hf empty out", "empty no checkpoint"),
    ("convert.py ckpt-to-hf run book.txt", "book.txt"),
    ("sample.py --init_from=fast_export", "nightshift_fast gpt2"),
    ("sample.py --init_from=relu", "activation_function relu"),
    ("sample.py --init_from=unscaled", "scale_attn_weights False"),
    ("sample.py --init_from=torn_config", "torn_config JSON"),
    ("sample.py --init_from=old_format", "old_format model.safetensors"),
    ("sample.py --init_from=cut_weights", "cut_weights not a model Safetensor"),
]

# what another launcher may leave in the environment
LEFTOVERS = [
    ("WORLD_SIZE=", "WORLD_SIZE '' unset WORLD_SIZE torchrun"),
    ("WORLD_SIZE=two", "WORLD_SIZE 'two' unset WORLD_SIZE torchrun"),
    ("WORLD_SIZE=2", "WORLD_SIZE=2 RANK is not unset WORLD_SIZE torchrun"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 MASTER_PORT=29500", "MASTER_ADDR is not unset"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=b", "MASTER_PORT 'b' unset"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=99999", "port 99999 unset"),
    ("WORLD_SIZE=1 RANK=3", "RANK=3 WORLD_SIZE=1 unset torchrun"),
    ("RANK=-1", "RANK '-1' unset RANK"),
    ("LOCAL_WORLD_SIZE=", "LOCAL_WORLD_SIZE '' unset LOCAL_WORLD_SIZE"),
]
ROWS = "data/prepare_fineweb.py --tokenizer=byte --out=out --source"
PREPARATION = [
    ("data/prepare_text.py nowhere.txt --out=out", "nowhere.txt no such"),
    ("data/prepare_text.py nowhere.txt book.docx --out=out", "nowhere.txt", "book.docx"),
    ("data/prepare_text.py array.json --out=out", "array.json .jsonl"),
    ("data/prepare_text.py saved --out=out", "saved/data-00000-of-00001.arrow .parquet"),
    ("data/prepare_text.py latin1.txt --encoding=utf9 --out=out", "latin1.txt line 3 utf9"),
    ("data/prepare_text.py short.txt --out=out", "short.txt 129 more text 2,600"),
    ("data/prepare_text.py empty.jsonl --out=out", "empty.jsonl"),
    ("data/prepare_text.py posts.jsonl --out=out", "posts.jsonl text --text_field"),
    ("data/prepare_text.py garbage.parquet --out=out", "garbage.parquet Parquet"),
    ("data/prepare_text.py book.txt --val_fraction=2 --out=out", "--val_fraction"),
    ("data/prepare_text.py book.txt --write=tiny.py", "tiny.py exist"),
    ("data/prepare_text.py book.txt --write=config", "config .py"),
    ("data/prepare_text.py book.txt --tokenizer=gpt2 --write=new.py", "--write own_text.md"),
    ("data/prepare_text.py book.txt --ouput=out", "--ouput"),
    ("data/prepare_text.py book.txt --out=tokens", "tokens other text"),
    ("data/prepare_text.py book.txt --out=chars", "chars another program"),
    ("data/prepare_text.py book.txt --out=book.txt", "book.txt"),
    (f"data/prepare_text.py book.txt --out={ROOT / 'data'}", "own files"),
    ("data/prepare_fineweb.py --tokens=lots --out=out", "--tokens lots"),
    ("data/prepare_fineweb.py --tokens=0 --out=out", "--tokens 0"),
    ("data/prepare_fineweb.py --workers=0 --out=out", "--workers 0"),
    (f"{ROWS}=nowhere", "nowhere no such"),
    (f"{ROWS}=book.txt", "book.txt .parquet"),
    (f"{ROWS}=empty.jsonl", "empty.jsonl 0 more text"),
    (f"{ROWS}=lists.parquet", "lists.parquet text (list<element: string>) --text_field"),
    (f"{ROWS}=good.jsonl --token=1M", "--token"),
    (f"{ROWS}=good.jsonl --order=records", "--order 'records' shuffled prefix"),
]


class Evil:
    """Write a file when a careless program unpickles this object."""

    def __reduce__(self):
        return Path.write_text, (Path("evil_was_here"), "!")


def write_folders_of_tokens() -> None:
    write_tokens(Path("tokens"), train=[700, 500], val=[250])
    write_tokens(Path("other"), train=[700, 501], val=[250])
    write_tokens(Path("wide"), train=[700], val=[250], vocab=99)
    write_tokens(Path("short_val"), train=[700], val=[10])
    for name in ("cut", "lost_shard", "no_manifest", "bad_manifest", "unfinished"):
        shutil.copytree("tokens", name)
    shutil.copytree("tokens", "bad_sha")
    shard = Path("cut/train_000002.bin")
    shard.write_bytes(shard.read_bytes()[:-10])
    Path("lost_shard/train_000002.bin").unlink()
    Path("no_manifest/manifest.json").unlink()
    Path("bad_manifest/manifest.json").write_text('{"tokenizer": ')
    for name, changes in (("unfinished", dict(complete=False)), ("bad_sha", {})):
        path = Path(name, "manifest.json")
        manifest = json.loads(path.read_text()) | changes
        manifest["shards"][1]["sha256"] = "0" * 64
        path.write_text(json.dumps(manifest))


def write_nanogpts_folders() -> None:
    ids = (torch.arange(2000) % 61).to(torch.int16).numpy()
    letters = [chr(48 + i) for i in range(61)]
    meta = dict(vocab_size=61, itos=dict(enumerate(letters)))
    for name in ("chars", "evil_meta"):
        Path(name).mkdir()
        ids.tofile(f"{name}/train.bin")
        ids.tofile(f"{name}/val.bin")
        Path(name, "meta.pkl").write_bytes(pickle.dumps(meta))
    Path("evil_meta/meta.pkl").write_bytes(pickle.dumps(meta | dict(stoi=Evil())))


def write_runs() -> None:
    result = run("train.py", "tiny.py", "--out_dir=run")
    assert result.code == 0, result.err
    Path("console.txt").write_text(result.out)
    newest = Path("run/ckpt-00000002.pt").read_bytes()
    Path("damaged_run").mkdir()
    for name in ("ckpt-00000001.pt", "ckpt-00000002.pt"):
        Path("damaged_run", name).write_bytes(newest[: len(newest) // 2])
    Path("best_alone").mkdir()
    Path("best_alone/best.pt").write_bytes(newest)
    Path("nanogpt_run").mkdir()
    torch.save(dict(model_args={}, model={}), "nanogpt_run/ckpt.pt")
    Path("cut.pt").write_bytes(newest[:-1000])
    middle = len(newest) // 2
    Path("flipped.pt").write_bytes(
        newest[:middle] + bytes([newest[middle] ^ 1]) + newest[middle + 1 :]
    )
    state = torch.load("run/ckpt-00000002.pt", weights_only=True)
    state["model"]["transformer.wte.weight"][0, 0] = float("nan")
    torch.save(state, "nan.pt")
    torch.save(Evil(), "evil.pt")
    for name in ("evil_run", "downloaded"):
        Path(name).mkdir()
    shutil.copy("evil.pt", "evil_run/ckpt-00000002.pt")
    Path("downloaded/ckpt-00000002 (1).pt").write_bytes(newest)
    torch.save(dict(weights=torch.zeros(3)), "unknown.pt")
    Path("gone").symlink_to("/nowhere/runs")  # on a disk that is not mounted


def write_hugging_faces_folders() -> None:
    configs = dict(
        llama=dict(model_type="llama"),
        fast_export=dict(model_type="nightshift_fast"),
        relu=dict(model_type="gpt2", activation_function="relu"),
        unscaled=dict(model_type="gpt2", scale_attn_weights=False),
        old_format=dict(model_type="gpt2"),
        cut_weights=dict(model_type="gpt2"),
        torn_config={},
    )
    for name, config in configs.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config))
    Path("old_format/pytorch_model.bin").write_bytes(b"PK")
    Path("cut_weights/model.safetensors").write_bytes(b"cut")
    Path("torn_config/config.json").write_text('{"model_type": "gp')


def write_texts() -> None:
    text = "It was a dark and stormy night.\n" * 300
    Path("book.txt").write_text(text)
    Path("old.log").write_text("iter 100: loss 4.5, time 168.20ms, mfu 41.20%\n")
    Path("book.docx").write_bytes(b"PK\3\4")
    Path("short.txt").write_text("Too short.")
    Path("latin1.txt").write_bytes(("x\n" * 2 + "caf\u00e9 " * 99).encode("latin1"))
    Path("empty.jsonl").write_text("")
    Path("array.json").write_text("its ending is enough")
    Path("saved").mkdir()
    Path("saved/data-00000-of-00001.arrow").write_text("as save_to_disk names it")
    Path("saved/state.json").write_text("{}")
    Path("garbage.parquet").write_bytes(bytes(range(200)))
    Path("good.jsonl").write_text('{"text": "It was a dark night."}\n' * 300)
    lists = pyarrow.table({"text": [["It", "was"]] * 300, "n": [1] * 300})
    pyarrow.parquet.write_table(lists, "lists.parquet")
    Path("posts.jsonl").write_text('{"body": "It was a dark night.", "title": "Night"}\n' * 300)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Create the folder in which check() runs the commands. No command may change it."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shutil.copytree(ROOT / "config", "config")
        Path("empty").mkdir()
        Path("tiny.py").write_text(TINY)
        Path("raises.py").write_text("n_layer = 2\nn_head = n_layer / 0\n")
        Path("syntax.py").write_text("n_layer = = 2\n")
        Path("typo.py").write_text("n_layers = 2\n")
        Path("removed.py").write_text("data_workers = 2\n")
        Path("wrong_type.py").write_text("batch_size = 'many'\n")
        write_folders_of_tokens()
        write_nanogpts_folders()
        write_texts()
        write_runs()
        write_hugging_faces_folders()
    return folder


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return all paths in a folder, with the size and the time of the last change of files."""
    found = {}
    for path in folder.rglob("*"):
        stat = path.lstat()
        found[str(path)] = (0, 0) if path.is_dir() else (stat.st_size, stat.st_mtime_ns)
    return found


def assert_refused(lines: list[str], expected: tuple[str, ...]) -> None:
    """
    Check that there is one error per expected text, with all words of the text, and that the other
    lines are warnings. An indented line continues the line before.
    """
    lines = "\n".join(lines).replace("\n    ", " ").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert all(line.isprintable() for line in lines), lines
    assert all(line.startswith(("error: ", "warning: ")) for line in lines), lines
    assert len(errors) == len(expected), lines
    for words in expected:
        assert any(all(word in line for word in words.split()) for line in errors), (words, lines)


def check(folder: Path, monkeypatch, command: str, *expected: str) -> None:
    monkeypatch.chdir(folder)
    before = listing(folder)
    script, *arguments = command.split()
    result = run(script, *arguments)
    assert result.code == 2, result
    assert result.out == ""
    assert_refused(result.err.splitlines(), expected)
    assert listing(folder) == before


BAD_STARTS = COMMAND_LINE + DATA + FOLDERS + TOOLS + PREPARATION


@pytest.mark.parametrize("row", BAD_STARTS, ids=[row[0] for row in BAD_STARTS])
def test_a_bad_command_prints_one_error_per_problem_and_changes_no_file(row, world, monkeypatch):
    check(world, monkeypatch, *row)


@pytest.mark.parametrize("flag", OF_A_RUN)
def test_resuming_is_refused_if_a_flag_changes_a_setting_that_is_fixed_on_resume(
    flag, world, monkeypatch
):
    command = f"train.py tiny.py --init_from=resume --out_dir=run --max_iters=3 --{flag}"
    check(world, monkeypatch, command, flag.partition("=")[0])


@pytest.mark.parametrize("flag", ARCHITECTURE)
def test_fine_tuning_is_refused_if_a_flag_changes_the_architecture_of_the_weights(
    flag, world, monkeypatch
):
    check(world, monkeypatch, f"train.py tiny.py --init_from=run --{flag}", flag.partition("=")[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("script", ["train.py tiny.py", "sample.py --out_dir=run"])
def test_device_cuda_without_a_gpu_is_refused_with_the_flag_for_the_cpu(script, world, monkeypatch):
    check(world, monkeypatch, f"{script} --device=cuda", "device cuda --device=cpu")


# root may look into any folder, so this code first gives up all privileges
UNPRIVILEGED = """
import ctypes
version_3, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(version_3, none) == 0
"""


@pytest.mark.parametrize("row", LEFTOVERS, ids=[row[0] for row in LEFTOVERS])
def test_invalid_variables_of_another_launcher_are_refused_with_advice_to_unset_them(
    row, world, monkeypatch
):
    variables, words = row
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    check(world, monkeypatch, "train.py tiny.py", words)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's capabilities")
@pytest.mark.parametrize("key", ["out_dir", "dataset"])
def test_a_folder_without_permission_gives_one_error(key, world, tmp_path):
    (tmp_path / "private").mkdir(mode=0)
    keys = dict(dataset=world / "tokens", out_dir=tmp_path / "new")
    keys |= {key: tmp_path / "private" / "x"}
    words = [*watched(before=UNPRIVILEGED), str(world / "tiny.py"), *flags(**keys)]
    result = finish(start(*words))
    assert result.code == 2
    assert_refused(result.err.splitlines(), ("private/x Permission denied",))
    assert not (tmp_path / "new").exists()


def test_help_is_printed_once_by_several_ranks():
    results = finish_ranks(start_ranks(2, "--help"))
    assert [(result.code, result.err) for result in results] == [(0, "")] * 2
    assert [bool(result.out) for result in results] == [True, False]
