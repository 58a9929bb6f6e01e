"""
Make, download or explain a missing dataset: train.py makes the quickstart's, downloads the fast
recipe's, and says how to get another. bench.py measures and plans without one.

The fast recipe's dataset is FineWeb in GPT-2's tokens, the shards of the public runs.
"""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

from common.console import BELOW, UserError, command_line, one_line, say, short
from common.files import locked, names_in, patiently, sha256_of
from configurator import Config
from data.shards import FINEWEB_VAL, dataset_folder, read_manifest, split_of
from data.tokenizer import BYTE_VOCAB, GPT2_VOCAB

QUICKSTART_DATA = "python_stdlib"
SHAKESPEARE_DATA = "shakespeare_char"
# nanoGPT's text; its validation split is the last tenth
SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
FAST_DATA = "fineweb_records"
# FAST_DATA on the hub: so many files of tokens for training, and FINEWEB_VAL
REPOSITORY, TRAIN_FILES = "kjj0/fineweb10B-gpt2", 103
SHARD_TOKENS = 10**8  # in each file; a token takes two bytes
SAMPLE_TOKENS = 10**10  # in FineWeb-Edu's sample


def make_or_explain(config: Config, key: str) -> None:
    """
    If the dataset that this key names is missing, make it if it is the quickstart's, download it if
    it is the fast recipe's, or else raise UserError with the commands that make it. Any number of
    processes may call this at once, if the disk supports locks: one works while the others wait,
    and another takes over if that one ends. Raises OSError and UserError.
    """
    name = getattr(config, key)
    folder = dataset_folder(name)
    tokens = config.tokens_between(0, config.max_iters)
    names_in(folder)  # raises OSError if its disk fails, or else it would be made again below
    if name == QUICKSTART_DATA and not is_there(folder):
        script = Path(__file__).with_name("prepare_text.py")
        say(f"data: preparing {folder} from Python's own source files")
        command = [sys.executable, str(script), f"--out={folder}"]
        # Hide the script's output, which ends by telling the user what to type next.
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise UserError(f"{key}: {script} failed; see its message above")
    elif name == FAST_DATA:
        if not is_there(folder):
            download(folder, files_to_download(config))
        shards = [*folder.glob("*_train_*.bin")]
        held = sum(path.stat().st_size for path in shards) // 2
        if held < tokens and len(shards) < TRAIN_FILES:
            old = f"{folder}_{len(shards)}"
            problem = f"{folder}: {short(held)} tokens repeat, as max_iters reads {short(tokens)}"
            hint = f"for a new run with more, first type{BELOW}{command_line('mv', folder, old)}"
            keep = f"runs that began with this one then resume with --{key}={old}"
            say(f"warning: {problem}; {hint}", keep)  # to stdout, where rank 0 alone prints
    elif name == SHAKESPEARE_DATA and not folder.is_dir():
        get = command_line("curl", "-fo", "shakespeare.txt", SHAKESPEARE)
        words = ("python", "data/prepare_text.py", "shakespeare.txt", "--val_fraction=0.1")
        make = command_line(*words, f"--out={folder}")
        hint = f"give nanoGPT's with --{key}=PATH, or make it"
        raise UserError(f"{key}: there is no folder {folder}; {hint}{BELOW}{get}{BELOW}{make}")
    elif not folder.is_dir():
        # with --hours a card reads only a part of max_iters
        most = 2 * 10**9 if config.hours else SAMPLE_TOKENS
        size = f"--tokens={short(min(tokens or most, most))}"
        fineweb = command_line("python", "data/prepare_fineweb.py", size, f"--out={folder}")
        own = command_line("python", "data/prepare_text.py", "FILE", f"--out={folder}")
        hint = f"give another with --{key}=PATH, or make it from FineWeb-Edu or from your own files"
        raise UserError(f"{key}: there is no folder {folder}; {hint}{BELOW}{fineweb}{BELOW}{own}")


def is_there(folder: Path) -> bool:
    """Return whether a folder holds a whole dataset. A download ends with the validation tokens."""
    names = names_in(folder)
    if "manifest.json" in names:
        return read_manifest(folder).get("complete", True)
    return any(split_of(name) == "val" for name in names if name.endswith(".bin"))


def vocab_where_missing(config: Config) -> int | None:
    """
    Return the vocabulary size to plan and measure with before the dataset exists: the byte
    vocabulary for the quickstart's and Shakespeare's, else GPT-2's. None if the dataset exists.
    """
    if is_there(dataset_folder(config.dataset)):
        return None
    return BYTE_VOCAB if config.dataset in (QUICKSTART_DATA, SHAKESPEARE_DATA) else GPT2_VOCAB


def files_to_download(config: Config) -> list[str]:
    """Name the files of FAST_DATA that hold what this run reads, the validation tokens last."""
    shards = math.ceil(config.tokens_between(0, config.max_iters) / SHARD_TOKENS)
    # With fewer than 20, a short trial would leave too few for the night after it.
    shards = min(max(shards, 20), TRAIN_FILES)
    return [*(f"fineweb_train_{n:06}.bin" for n in range(1, shards + 1)), FINEWEB_VAL]


def download(folder: Path, names: list[str]) -> None:
    """
    Download the files that the folder lacks. While another process does so, wait. Each file appears
    under its name once it is complete and right, so that the next call continues. Raises OSError
    and UserError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if is_there(folder):
            return
        missing = [name for name in names if not (folder / name).exists()]
        disk = shutil.disk_usage(folder)
        size = 2 * SHARD_TOKENS  # bytes
        needed = size * len(missing)
        if disk.total and disk.free < needed:  # some disks do not tell their size
            problem = f"needs {needed / 1e9:.1f} GB of disk, has {disk.free / 1e9:.1f} GB free"
            raise UserError(f"{folder}: {problem}; make room, then repeat the command")
        say(
            f"data: downloading {needed / 1e9:.1f} GB of FineWeb to {folder}; "
            "if that is interrupted, the same command continues"
        )
        for number, name in enumerate(missing, 1 + len(names) - len(missing)):
            fetch(name, folder)
            say(f"data: file {number} of {len(names)}, {number * size / 1e9:.1f} GB")
        shutil.rmtree(folder / "part", ignore_errors=True)


def fetch(name: str, folder: Path) -> None:
    """
    Download a file of FAST_DATA into folder/part, and move it to the folder if it is what the hub
    has. If that fails, the library (before version 1.19 not in mid-file) tries again for half a
    minute, at the same byte. Raises OSError and UserError.
    """
    # lazily, because training on prepared shards needs none of its packages
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # a line per file is enough, also in a log
    url = hf_hub_url(REPOSITORY, name, repo_type="dataset")
    try:
        sha256 = get_hf_file_metadata(url).etag or ""  # the library itself compares only sizes
        part = folder / "part"
        path = Path(hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=part))
        if len(sha256) == 64 and sha256_of(path) != sha256:  # a mirror may send another ETag
            path.unlink()
            raise ValueError("its bytes are not those that the hub promises")
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # of the disk, not of the network
            raise
        hint = "check the network, then repeat the command"
        raise UserError(f"{REPOSITORY}: {name}: {one_line(error)}; {hint}") from None
    patiently(os.replace, path, folder / name)
