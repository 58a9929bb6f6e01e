"""Define the data that several files of this folder share."""

from pathlib import Path

import pytest
from char_dataset import write_letters


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Path:
    return write_letters(tmp_path_factory.mktemp("data") / "letters")
