"""
The config file of prepare_text.py --write: a small fast model for a text that is read many times.
docs/own_text.md has the rule and what was measured.
"""

import shlex
from pathlib import Path

from data.tokenizer import Tokenizer

TEMPLATE = Path(__file__).with_name("own_config.template")
BLOCK_SIZE, ITER_TOKENS = 256, 2048  # as the template has them
MOST_TOKENS = 5_000_000  # to train on: about ten minutes on two CPU cores
MOST_READINGS = 10
MOST_EVAL_TOKENS = 2**18  # all of validation in up to 5M tokens of text


def write_config(path: Path, dataset: Path, tokenizer: Tokenizer, train: int, val: int) -> None:
    """Write the file for a dataset of so many tokens in each split. Raises OSError."""
    max_iters = 1 + min(MOST_TOKENS, MOST_READINGS * train) // ITER_TOKENS
    if tokenizer.kind == "byte":
        bigram_rows, dropout_below = 16384, 850_000
    else:  # a BPE is learnt by heart sooner, and its pairs wherever the text is read again
        bigram_rows, dropout_below = (0 if train < MOST_TOKENS else 65536), MOST_TOKENS
    text = TEMPLATE.read_text("utf-8").format(
        path=shlex.quote(str(path)),
        dataset=dataset.as_posix(),
        out_dir=f"out/{path.stem}",
        tokenizer=tokenizer,
        train=train,
        bigram_rows=bigram_rows,
        dropout=0.2 if train < 500_000 else 0.1 if train < dropout_below else 0.0,
        max_iters=max_iters,
        eval_interval=1 + max_iters // 10,
        eval_tokens=min(val, MOST_EVAL_TOKENS),
        epochs=max_iters * ITER_TOKENS / train,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
