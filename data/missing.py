"""
Help where a dataset is missing: make the quickstart's, download the fast recipe's, say how to get
another, and name the vocabulary size to plan and measure with until then.
"""

import subprocess
import sys
from pathlib import Path

from common.console import COMMAND, UserError, command_line, count, say
from configurator import Config
from data.download import download, warn_of_repeats
from data.shards import dataset_folder, read_manifest
from data.tokenizer import BYTE_VOCAB, GPT2_VOCAB

MOST_TOKENS = 10**10  # the most that a message or a plan suggests to prepare: FineWeb-Edu's sample
HOURS_TOKENS = 2 * 10**9  # a little more than an RTX 4070 reads in a night
PREPARED_ON_DEMAND = "python_stdlib"  # the quickstart's dataset, which train.py makes itself
DOWNLOADED_ON_DEMAND = "fineweb_records"  # the fast recipe's, which train.py downloads


def make_or_explain(config: Config, key: str) -> None:
    """
    If the dataset that this key names is missing, make it if it is the quickstart's, download it if
    it is the fast recipe's, or else raise UserError with the commands that make it.
    """
    name = getattr(config, key)
    folder = dataset_folder(name)
    is_there = (folder / "manifest.json").exists() and read_manifest(folder).get("complete", True)
    if name == PREPARED_ON_DEMAND and not is_there:
        script = Path(__file__).with_name("prepare_text.py")
        say(f"data: preparing {folder} from Python's own source files")
        command = [sys.executable, str(script), f"--out={folder}"]
        # Hide the script's output, which ends by telling the user what to type next.
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise UserError(f"{key}: {script} failed; see its message above")
    elif folder.is_symlink() and not folder.exists():
        raise UserError(f"{key}: {folder} is a link to nothing; is its disk mounted?")
    elif name == DOWNLOADED_ON_DEMAND:
        tokens = run_tokens(config)
        if not any(folder.glob("*")):
            download(folder, tokens)
        warn_of_repeats(folder, tokens)
    elif not folder.is_dir():
        raise UserError(explanation(config, key, folder))


def run_tokens(config: Config) -> int:
    """Return how many tokens a run reads at most."""
    return config.iter_tokens * config.max_iters


def explanation(config: Config, key: str, folder: Path) -> str:
    """Say that the dataset of this key is missing, and how to get it."""
    most = HOURS_TOKENS if config.hours else MOST_TOKENS
    size = f"--tokens={count(min(run_tokens(config), most))}"
    fineweb = command_line("python", "data/prepare_fineweb.py", size, f"--out={folder}")
    own = command_line("python", "data/prepare_text.py", "FILE", f"--out={folder}")
    hint = f"give another with --{key}=PATH, or make it from FineWeb-Edu or from your own files"
    return f"{key}: there is no folder {folder}; {hint}{COMMAND}{fineweb}{COMMAND}{own}"


def vocab_where_missing(config: Config) -> int | None:
    """
    Return the vocabulary size to plan and measure with before the dataset exists: the byte
    vocabulary for the quickstart's dataset, else GPT-2's. None if the dataset exists.
    """
    if any(dataset_folder(config.dataset).glob("*")):
        return None
    return BYTE_VOCAB if config.dataset == PREPARED_ON_DEMAND else GPT2_VOCAB
