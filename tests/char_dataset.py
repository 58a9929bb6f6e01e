"""
Provide a dataset of characters as nanoGPT prepares it, the texts that sample.py prints, and a model
that always predicts one token.
"""

import pickle
from pathlib import Path

import numpy as np
import torch
from program import TINY_RUN, Result, Run, run, train

T = 16  # context
LETTERS = "\n" + "".join(map(chr, range(63, 123)))  # 61 characters, not a multiple of 128
SHORT_RUN = TINY_RUN | dict(
    learning_rate=0.01, warmup_iters=2, max_iters=8, eval_interval=4, eval_tokens=10 * T
)
RULER = "\n---------------\n"


def train_short(dataset: Path, out_dir: Path, **changes) -> Result:
    """Train a short run on a dataset."""
    return train(**SHORT_RUN | dict(dataset=dataset, out_dir=out_dir) | changes)


def write_letters(folder: Path) -> Path:
    """Write a dataset of characters as nanoGPT prepares it."""
    folder.mkdir(parents=True)
    rng = np.random.RandomState(1)
    for split, size in (("train", 1500), ("val", 20 * T + 1)):
        ids = np.cumsum(rng.randint(0, 3, size)) % len(LETTERS)
        ids.astype("<u2").tofile(folder / f"{split}.bin")
    meta = dict(vocab_size=len(LETTERS), itos=dict(enumerate(LETTERS)))
    meta["stoi"] = {letter: i for i, letter in enumerate(LETTERS)}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def write_nanogpts_checkpoint(path: Path, vocab: int = len(LETTERS), width: int = 32) -> Path:
    """Write a checkpoint as nanoGPT saves it for a compiled model."""
    C, generator = width, torch.Generator().manual_seed(0)
    sizes = dict(n_layer=2, n_head=2, n_embd=C, block_size=T, bias=False, vocab_size=vocab)
    shapes = {"transformer.wte.weight": (vocab, C), "transformer.wpe.weight": (T, C)}
    for block in ("transformer.h.0", "transformer.h.1"):
        shapes |= {f"{block}.ln_1.weight": (C,), f"{block}.ln_2.weight": (C,)}
        shapes |= {f"{block}.attn.c_attn.weight": (3 * C, C), f"{block}.attn.c_proj.weight": (C, C)}
        shapes |= {f"{block}.mlp.c_fc.weight": (4 * C, C), f"{block}.mlp.c_proj.weight": (C, 4 * C)}
    shapes["transformer.ln_f.weight"] = (C,)
    weights = {
        name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    for name in weights:
        weights[name] += len(shapes[name]) == 1  # norms around 1
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, T, T).tril()  # as in old checkpoints
    model = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    state = dict(model=model, optimizer={}, model_args=sizes | dict(dropout=0.0), iter_num=500)
    state |= dict(best_val_loss=torch.tensor(2.5), config=dict(dataset="letters"))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    return path


def sample(*arguments: str) -> list[str]:
    """Run sample.py on the CPU, and return the texts that it prints."""
    result = run("sample.py", "--device=cpu", "--dtype=float32", *arguments)
    assert result.code == 0, result.err
    *texts, rest = result.out.split(RULER)
    assert rest.strip() == ""
    return texts


def write_parrot(run_folder: Path, path: Path, token: int) -> Path:
    """Write a copy of a run's newest checkpoint that always predicts `token`."""
    state = Run(run_folder).state()
    weights = state["model"]
    weights["transformer.ln_f.weight"].zero_()
    weights["transformer.ln_f.bias"].zero_()
    weights["transformer.ln_f.bias"][0] = 1
    weights["lm_head.weight"].zero_()
    weights["lm_head.weight"][token, 0] = 100
    torch.save(state, path)
    return path
