"""
The config file of prepare_text.py --write: a small fast model for a text that is read many times.
docs/own_text.md has the rule and what was measured.
"""

import shlex
from pathlib import Path

from data.tokenizer import Tokenizer

TEMPLATE = Path(__file__).with_name("own_config.template")
BLOCK_SIZE, ITER_TOKENS = 256, 2048  # as the template has them
MOST_READINGS = 10
MOST_EVAL_TOKENS = 2**18  # all of validation in up to 5M tokens of text


def write_config(path: Path, dataset: Path, tokenizer: Tokenizer, train: int, val: int) -> None:
    """Write the file for a dataset of so many tokens in each split. Raises OSError."""
    # `most`: tokens to train on in ten minutes on two CPU cores, or less
    if tokenizer.kind == "byte":
        most = 5_000_000
        model = dict(n_layer=3, n_embd=128, bigram_rows=16384)
    else:  # its pairs are learnt by heart where the text is read again
        most = 3_150_000
        model = dict(n_layer=4, n_embd=160, bigram_rows=0 if train < most else 65536)
    max_iters = 1 + min(most, MOST_READINGS * train) // ITER_TOKENS
    text = TEMPLATE.read_text("utf-8").format(
        path=shlex.quote(str(path)),
        dataset=dataset.as_posix(),
        out_dir=f"out/{path.stem}",
        tokenizer=tokenizer,
        train=train,
        **model,
        dropout=0.2 if train < 500_000 else 0.1 if train < 850_000 else 0.0,
        max_iters=max_iters,
        eval_interval=1 + max_iters // 10,
        eval_tokens=min(val, MOST_EVAL_TOKENS),
        epochs=max_iters * ITER_TOKENS / train,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
