"""
Train on GPUs that are not here: `python dev/simulate_gpu/run.py [ROW...]`.

Each row trains a shipped configuration for a few iterations, in a process of its own, on a card
that counts instead of computing (nullgpu.c). KERNELS ARE NOT RUN: nothing here is a time, a loss or
a gradient. Finished rows are kept in results/nullgpu.json with a fingerprint of their code. The
command runs the rows that it names, or else all that are missing or stale. What this can and cannot
show: dev/simulate_gpu/results.md.
"""

import argparse
import ast
import collections
import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "results" / "nullgpu.json"
TORCH = "2.13.0"
NANOGPT = "https://github.com/karpathy/nanoGPT"
GIB = 2**30

# name, compute capability, SMs, GiB, KiB of shared memory per block and per SM, MiB of L2,
# threads per SM
CARDS = {
    "4070": "NVIDIA GeForce RTX 4070|8|9|46|12|99|100|36|1536",
    "t4": "Tesla T4|7|5|40|15|64|64|4|1024",
    "a100": "NVIDIA A100-SXM4-80GB|8|0|108|80|163|164|40|2048",
    "h200": "NVIDIA H200|9|0|132|140|227|228|50|2048",
    "5090": "NVIDIA GeForce RTX 5090|12|0|170|32|99|100|96|1536",
}


@dataclass(frozen=True)
class Row:
    """A configuration on a card. `whole` runs all of train.py, otherwise only its train_step."""

    card: str
    config: str
    flags: str = ""
    whole: bool = False
    nanogpt: bool = False  # nanoGPT's model in place of ours


EAGER = "--compile=False"
BF16, FP16 = "--dtype=bfloat16", "--dtype=float16"
ROWS = {
    "4070-gpt2": Row("4070", "gpt124m_4070", whole=True),
    "4070-gpt2-recompute": Row("4070", "gpt124m_4070", "--recompute=True"),
    "4070-gpt2-dropout": Row("4070", "gpt124m_4070", "--dropout=0.1"),
    "4070-gpt2-muon": Row("4070", "gpt124m_4070", "--optimizer=muon"),
    "4070-gpt2-eager": Row("4070", "gpt124m_4070", EAGER),
    "4070-gpt2-eager-off": Row("4070", "gpt124m_4070", f"{EAGER} --loss_chunk=off"),
    "4070-gpt2-eager-recompute": Row("4070", "gpt124m_4070", f"{EAGER} --recompute=True"),
    "4070-gpt2-eager-dropout": Row("4070", "gpt124m_4070", f"{EAGER} --dropout=0.1"),
    "4070-gpt2-eager-float32": Row(
        "4070", "gpt124m_4070", f"{EAGER} --dtype=float32 --batch_size=4"
    ),
    "4070-fast": Row("4070", "fast124m", BF16, whole=True),
    "4070-fast-no-bias": Row("4070", "fast124m", f"{BF16} --bias=False"),
    "4070-fast-deterministic": Row("4070", "fast124m", f"{BF16} --deterministic=True"),
    "4070-fast-eager": Row("4070", "fast124m", f"{BF16} {EAGER}"),
    "4070-fast-eager-recompute": Row("4070", "fast124m", f"{BF16} {EAGER} --recompute=True"),
    "4070-nanogpt": Row("4070", "gpt124m_4070", nanogpt=True),
    "t4-gpt2": Row("t4", "gpt124m_4070", FP16),
    "t4-gpt2-eager": Row("t4", "gpt124m_4070", f"{FP16} {EAGER}", whole=True),
    "t4-fast": Row("t4", "fast124m", f"{FP16} --batch_size=4"),
    "t4-fast-eager": Row("t4", "fast124m", f"{FP16} {EAGER} --batch_size=4"),
    "a100-gpt2": Row("a100", "gpt124m_a100"),
    "a100-fast-eager-off": Row(
        "a100", "fast124m", f"{BF16} {EAGER} --batch_size=32 --loss_chunk=off"
    ),
    "h200-gpt2": Row("h200", "gpt124m_a100"),
    "h200-gpt2-64": Row("h200", "gpt124m_a100", "--batch_size=64 --loss_chunk=8192"),
    "h200-nanogpt-64": Row("h200", "gpt124m_a100", "--batch_size=64", nanogpt=True),
    "h200-fast": Row("h200", "fast124m", f"{BF16} --batch_size=32"),
    "h200-fast-64": Row("h200", "fast124m", f"{BF16} --batch_size=64 --loss_chunk=8192"),
    "h200-fast-128": Row("h200", "fast124m", f"{BF16} --batch_size=128"),
    "5090-fast": Row("5090", "fast124m", f"{BF16} --batch_size=32", whole=True),
}

# -----------------------------------------------------------------------------
# In the parent process: what the rows need, and which of them to run


def prepare(folder: Path) -> Path:
    """Return the Python of a venv with PyPI's CUDA build of torch. Makes the venv if needed."""
    python = folder / "venv" / "bin" / "python"
    if not (folder / "venv" / "done").exists():
        print(f"PyPI's CUDA build of torch, 4.8 GB, into {folder / 'venv'}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        # === takes the plain version alone, not a CPU build of it
        packages = [f"torch==={TORCH}", "numpy", "tiktoken", "tokenizers", "safetensors", "tqdm"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "venv" / "done").touch()
    source, library = HERE / "nullgpu.c", folder / "lib" / "libcuda.so.1"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(exist_ok=True)
        (headers,) = folder.glob("venv/lib/python*/site-packages/triton/backends/nvidia/include")
        options = ["-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", f"-I{headers}"]
        subprocess.run(["gcc", *options, source, "-o", library], check=True)
        for name in ("libcuda.so", "libnvidia-ml.so.1"):
            (library.parent / name).unlink(missing_ok=True)
            (library.parent / name).symlink_to(library.name)
    return python


def environment(folder: Path, card: str) -> dict[str, str]:
    return os.environ | dict(
        NULLGPU=CARDS[card],
        LD_PRELOAD=str(folder / "lib" / "libcuda.so.1"),
        LD_LIBRARY_PATH=str(folder / "lib"),
        TRITON_LIBCUDA_PATH=str(folder / "lib"),
        # compiled code is kept between rows, for each card
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor" / card),
        TRITON_CACHE_DIR=str(folder / "triton" / card),
        TORCHINDUCTOR_COMPILE_THREADS="2",
    )


def command_of(row: Row) -> str:
    return f"config/{row.config}.py {row.flags}".strip()


def fingerprint(row: Row) -> str:
    """Return a hash of the code that the row runs, without comments, and of its settings."""
    from configurator import config_values, load_config

    files = ["train.py", "model.py", "data/loader.py"]
    files += ["model_fast.py", "optimizer.py", "training/compiled.py", "training/hardware.py"]
    code = [ast.unparse(ast.parse((ROOT / name).read_text("utf-8"))) for name in files]
    config = config_values(load_config(command_of(row).split()))
    asked = f"{row} {CARDS[row.card]} {TORCH} {config}"
    return hashlib.sha256("".join([asked, *code]).encode()).hexdigest()[:16]


def run_row(name: str, python: Path, folder: Path, nanogpt: Path | None) -> dict | None:
    """Run a row in its own process. Returns its figures, or None if it failed (see the log)."""
    began, log, figures = time.time(), folder / f"{name}.log", folder / "figures.json"
    figures.unlink(missing_ok=True)
    command = [python, "-X", "faulthandler", __file__, name, f"--figures={figures}"]
    command += [f"--nanogpt={nanogpt}"] if ROWS[name].nanogpt else []
    with log.open("w") as output:
        env = environment(folder, ROWS[name].card)
        subprocess.run(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
    if not figures.exists():
        last = log.read_text().strip().rpartition("\n")[2]
        print(f"failed: {last} ({log})", flush=True)
        return None
    print(f"{time.time() - began:.0f} s", flush=True)
    return json.loads(figures.read_text())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--nanogpt", type=Path, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--folder", type=Path, default=ROOT / ".nullgpu", help="venv and caches")
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)  # in a row's own process
    options = parser.parse_args(arguments)
    if unknown := set(options.rows) - ROWS.keys():
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    if options.figures:
        measure_row(ROWS[options.rows[0]], options.figures, options.nanogpt)
    folder, nanogpt = options.folder.absolute(), options.nanogpt and options.nanogpt.absolute()
    os.chdir(ROOT)
    names = options.rows or [name for name in ROWS if is_missing(name)]
    if not nanogpt and (left_out := [name for name in names if ROWS[name].nanogpt]):
        names = [name for name in names if name not in left_out]
        print(f"left out: {', '.join(left_out)}, which need --nanogpt= (git clone {NANOGPT})")
    if not names:
        print(f"nothing else to run: {RESULTS} is of today's code")
        return 0
    python = prepare(folder)
    failed = []
    for number, name in enumerate(names, 1):
        asked = fingerprint(ROWS[name])  # before the row runs: its code may change later
        print(f"{name} ({number} of {len(names)})", end=": ", flush=True)
        figures = run_row(name, python, folder, nanogpt)
        if figures is None:
            failed.append(name)
            continue
        finished = read_results() | {name: dict(fingerprint=asked, **figures)}
        write_results({name: finished[name] for name in ROWS if name in finished})
    print(f"{len(failed)} failed" if failed else f"rows are in {RESULTS}")
    return 1 if failed else 0


def is_missing(name: str) -> bool:
    """Return whether the row has no result, or its code has changed since."""
    return read_results().get(name, {}).get("fingerprint") != fingerprint(ROWS[name])


def read_results() -> dict[str, dict]:
    return json.loads(RESULTS.read_text("utf-8"))["rows"] if RESULTS.exists() else {}


def write_results(rows: dict[str, dict]) -> None:
    """Write one figure per line, so that a diff is readable."""
    note = "Simulated by dev/simulate_gpu/run.py: kernels not run. No figure here is a time."
    text = json.dumps(dict(note=note, torch=TORCH, rows=rows), indent=1)
    unfinished = RESULTS.with_suffix(".tmp")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(RESULTS)


# -----------------------------------------------------------------------------
# In a row's process, on its card


class Counters:
    """Count what the card has been asked for so far, by name."""

    def __init__(self, path: Path):
        self.library, self.path = ctypes.CDLL(None), path
        self.launched = collections.Counter()  # what is counted in Python: see below
        self.libraries = []

    def count_triton(self) -> None:
        """Count each compiled kernel whenever it runs."""
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        run = CachingAutotuner.run

        def counted(kernel, *args, **kwargs):
            self.launched["compiled", kernel.fn.__name__] += 1
            return run(kernel, *args, **kwargs)

        CachingAutotuner.run = counted

    def read(self) -> collections.Counter:
        self.library.nullgpu_report(str(self.path).encode())
        counts = collections.Counter(self.launched)
        for line in self.path.read_text().splitlines():
            kind, number, *rest = line.split(maxsplit=2)
            counts[(kind, *rest)] += int(number)
        return counts


def stand_in_for_cudnn(counters: Counters) -> None:
    """
    Replace cuDNN's attention, which finds no card here: allocate what torch allocates around it,
    and count it. The memory of cuDNN's workspace is missing.
    """
    import torch

    library = torch.library.Library("aten", "IMPL")
    counters.libraries.append(library)  # otherwise the library and its functions would be freed

    def forward(q, k, v, *others, **keys):
        counters.launched["kernel", "cudnn_forward"] += 1
        numbers = q.new_empty((*q.shape[:3], 1), dtype=torch.float32)
        seed = q.new_empty((), dtype=torch.int64)
        return torch.empty_like(q), numbers, None, None, q.size(2), k.size(2), seed, seed, None

    def backward(dy, q, k, v, *others, **keys):
        counters.launched["kernel", "cudnn_backward"] += 1
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    library.impl("_scaled_dot_product_cudnn_attention", forward, "CUDA")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CUDA")


class Watch:
    """Stands in for train.train_step, and counts what each iteration asks of the card."""

    def __init__(self, counters: Counters):
        import train

        self.train_step, self.counters, self.iterations = train.train_step, counters, []
        train.train_step = self

    def __call__(self, model, *others):
        import torch
        from torch._dynamo.utils import counters as dynamo

        at_batch = []
        watched = WatchedModel(model, lambda: at_batch.append(self.counters.read()))
        graphs = dynamo["stats"]["unique_graphs"]
        torch.cuda.reset_peak_memory_stats()
        before = self.counters.read()
        result = self.train_step(watched, *others)
        self.iterations.append(
            dict(
                all=self.counters.read() - before,
                # from the second batch on, gradients are added to the previous ones
                micro_batch=at_batch[2] - at_batch[1],
                allocated=torch.cuda.max_memory_allocated(),
                reserved=torch.cuda.max_memory_reserved(),
                graphs=graphs,
            )
        )
        return result


class WatchedModel:
    """Wrap a model and note each call."""

    def __init__(self, model, note):
        self.model, self.note = model, note

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, x, y):
        self.note()
        return self.model(x, y)


def measure_row(row: Row, path: Path, nanogpt: Path | None) -> None:
    """Train, write the figures to `path`, and end this process."""
    counters = Counters(path.with_suffix(".counts"))
    counters.count_triton()
    stand_in_for_cudnn(counters)
    watch = Watch(counters)
    from configurator import load_config

    flags = [*command_of(row).split(), "--gradient_accumulation_steps=3"]
    config = load_config([*flags, "--dataset=none"])
    with tempfile.TemporaryDirectory() as folder:
        if row.whole:
            train_whole(config, flags, Path(folder))
        else:
            train_steps(config, nanogpt)
    path.write_text(json.dumps(figures_of(row, config, watch.iterations)))
    sys.stdout.flush()
    os._exit(0)  # torch's threads for a card that is not there do not end by themselves


def train_steps(config, nanogpt: Path | None) -> None:
    """Run four iterations of train.py's step."""
    from compare_nanogpt import nanogpts
    from training_setup import TrainingSetup

    from model_fast import build_model

    build = nanogpts(str(nanogpt), build_model) if nanogpt else build_model
    trainee = TrainingSetup(config, build=build)
    for _ in range(4):
        trainee.step()


def train_whole(config, flags: list[str], folder: Path) -> None:
    """
    Run train.py: two iterations, an evaluation, a sample and a checkpoint, then all of it again.
    """
    import numpy as np

    import train
    from data.shards import write_shard
    from data.tokenizer import GPT2_VOCAB

    tokens = np.random.default_rng(config.seed).integers(0, GPT2_VOCAB, 2**22, dtype=np.uint16)
    write_shard(folder / "train_000000.bin", tokens)
    write_shard(folder / "val_000000.bin", tokens[: 2 * config.block_size])
    flags += [f"--dataset={folder}", f"--out_dir={folder / 'out'}", "--init_from=scratch"]
    flags += ["--max_iters=4", "--eval_interval=2", "--eval_tokens=1024", "--checkpoint_interval=2"]
    flags += ["--warmup_iters=1", "--sample_tokens=8", "--log_interval=1"]
    train.main(flags)  # train_step was replaced with a Watch


def figures_of(row: Row, config, iterations: list[dict]) -> dict:
    """Return the row of results/nullgpu.json, without its fingerprint."""
    import torch
    from torch._dynamo.utils import counters as dynamo

    last = iterations[-1]
    counts, micro_batch = last["all"], last["micro_batch"]
    if config.compile and not of_kind(counts, "compiled"):
        raise RuntimeError("compiling has failed")
    graphs = dynamo["stats"]["unique_graphs"]
    return dict(
        card=row.card,
        command=command_of(row),
        model="nanoGPT" if row.nanogpt else config.model,
        allocated_gib=round(max(it["allocated"] for it in iterations[1:]) / GIB, 3),
        reserved_gib=round(torch.cuda.max_memory_reserved() / GIB, 3),
        waits=max(it["all"]["waits",] for it in iterations[1:]),
        launches=launches(counts),
        launches_of_a_micro_batch=launches(micro_batch),
        attention=attention_kernels(counts),
        graphs=graphs,
        graph_breaks=sum(dynamo["graph_break"].values()),
        recompilations=graphs - iterations[1]["graphs"],
    )


def of_kind(counts: collections.Counter, kind: str) -> dict[str, int]:
    return {key[1]: n for key, n in counts.items() if key[0] == kind}


def launches(counts: collections.Counter) -> int:
    return sum(of_kind(counts, "kernel").values()) + sum(of_kind(counts, "product").values())


def attention_kernels(counts: collections.Counter) -> str:
    known = dict(flash="flash_fwd", efficient="fmha_cutlassF", cuDNN="cudnn_forward")
    names = of_kind(counts, "kernel")
    return next((k for k, part in known.items() if any(part in name for name in names)), "plain")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "dev"), str(ROOT / "tests")]
    sys.exit(main())
