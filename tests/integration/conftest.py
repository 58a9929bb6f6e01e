"""Define the data and the run that several files of this folder share."""

from pathlib import Path

import pytest
from char_dataset import SHORT_RUN, T, write_letters
from program import train, write_tokens


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Path:
    return write_letters(tmp_path_factory.mktemp("data") / "letters")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Write a dataset with 20 contexts of validation tokens."""
    folder = tmp_path_factory.mktemp("data") / "tokens"
    return write_tokens(folder, train=[700, 37, 500], val=[20 * T + 1])


@pytest.fixture(scope="module")
def gpt2(letters, tmp_path_factory) -> Path:
    """Train GPT-2 on letters, with biases and an untied head."""
    out_dir = tmp_path_factory.mktemp("runs") / "gpt2"
    train(**SHORT_RUN, dataset=letters, out_dir=out_dir, bias=True, tie_weights=False)
    return out_dir
