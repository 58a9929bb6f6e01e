"""
The config file of prepare_text.py --write: a small fast model for a text that is read many times.
docs/own_text.md has the rule and what was measured.
"""

import math
import shlex
from pathlib import Path

from data.tokenizer import BYTE_VOCAB, Tokenizer

TEMPLATE = Path(__file__).with_name("own_config.template")
BLOCK_SIZE, ITER_TOKENS = 256, 2048  # as the template has them
MOST_TOKENS = 5_000_000  # to train on: ten minutes on two CPU cores, with time to spare
MOST_EPOCHS = 10
# below so many training tokens
BYTE_DROPOUT = ((500_000, 0.2), (850_000, 0.1), (math.inf, 0.0))
BPE_DROPOUT = ((500_000, 0.2), (MOST_TOKENS, 0.1), (math.inf, 0.0))
MOST_EVAL_TOKENS = 2**18  # all of validation in up to 5 MB of text


def write_config(path: Path, dataset: Path, tokenizer: Tokenizer, train: int, val: int) -> None:
    """Write the file for a dataset of so many tokens in each split. Raises OSError."""
    max_iters = 1 + min(MOST_TOKENS, MOST_EPOCHS * train) // ITER_TOKENS
    is_bytes = tokenizer.vocab == BYTE_VOCAB
    dropout = BYTE_DROPOUT if is_bytes else BPE_DROPOUT
    text = TEMPLATE.read_text("utf-8").format(
        path=shlex.quote(str(path)),
        dataset=dataset.as_posix(),
        out_dir=f"out/{path.stem}",
        tokenizer=tokenizer,
        train=train,
        bigram_rows=16384 if is_bytes else 0 if train < MOST_TOKENS else 65536,
        dropout=next(share for tokens, share in dropout if train < tokens),
        max_iters=max_iters,
        eval_interval=1 + max_iters // 10,
        eval_tokens=min(val, MOST_EVAL_TOKENS),
        epochs=max_iters * ITER_TOKENS / train,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
