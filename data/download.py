"""
Download the fast recipe's dataset: FineWeb in GPT-2's tokens, the shards of the public runs.
"""

import itertools
import math
import os
import shutil
import time
from pathlib import Path

from common.console import COMMAND, UserError, count, one_line, say, warn
from common.files import lack_of_space, patiently, try_lock, warn_once
from data.text import wait_or_raise

REPOSITORY = "kjj0/fineweb10B-gpt2"
SHARDS = 103  # for training; there is one more for validation
LEAST_SHARDS = 20  # to download: enough for a night, which may follow a short trial
SHARD_TOKENS, SHARD_BYTES = 10**8, 2 * 10**8


def shards_to_download(tokens: int) -> int:
    """Return how many training shards to download for a run that reads this many tokens."""
    return min(SHARDS, max(LEAST_SHARDS, math.ceil(tokens / SHARD_TOKENS)))


def download(folder: Path, tokens: int) -> None:
    """
    Download the validation shard and as many training shards as `tokens` need. The folder may exist
    if it is empty. It gets its files only when all have arrived; until then they are in a folder
    beside it, FOLDER.part, where the next call continues. Raises OSError, and UserError if the
    first file fails, or if a later one fails for an hour.
    """
    folder = folder.resolve()  # it may be a link to a larger disk
    shards = shards_to_download(tokens)
    names = [f"fineweb_{'train' if n else 'val'}_{n:06}.bin" for n in range(shards + 1)]
    part = folder.with_name(f"{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.tmp"), "wb") as lock:
        while not try_lock(lock):
            warn_once(f"{folder}: another run is downloading it; waiting")
            time.sleep(1)
        if any(folder.glob("*")):
            return
        part.mkdir(exist_ok=True)
        missing = [name for name in names if not (part / name).exists()]
        left = SHARD_BYTES * len(missing)
        if problem := lack_of_space(part, left):
            raise UserError(f"{problem}; make room, then repeat the command")
        say(
            f"data: downloading {left / 1e9:.1f} GB of FineWeb to {folder}; "
            "if that is interrupted, the same command continues"
        )
        for number, name in enumerate(missing, 1 + len(names) - len(missing)):
            fetch(name, part, name == missing[0])
            say(f"data: file {number} of {len(names)}, {number * SHARD_BYTES / 1e9:.1f} GB")
        shutil.rmtree(part / ".cache", ignore_errors=True)  # the library's notes
        if folder.exists():
            folder.rmdir()  # Windows cannot rename onto it
        patiently(os.rename, part, folder)


def warn_of_repeats(folder: Path, tokens: int) -> None:
    """Warn if a run reads more tokens than the folder holds, though there are more to download."""
    shards = [*folder.glob("*_train_*.bin")]
    held = sum(path.stat().st_size for path in shards) // 2
    missing = min(SHARDS - len(shards), math.ceil((tokens - held) / SHARD_TOKENS))
    if missing > 0:
        problem = f"{folder}: holds {count(held)} tokens, but the run reads up to {count(tokens)}"
        hint = f"for a new run that downloads {missing} more shards, first type"
        warn(f"{problem}, so some several times; {hint}{COMMAND}mv {folder} {folder}.part")


def fetch(name: str, folder: Path, is_first: bool) -> None:
    """
    Download a file, which appears once it is complete. If the hub fails, the library tries again
    for half a minute, at the same byte; after that, wait and fetch the file anew. The first file is
    not fetched again, because somebody is probably watching. Raises UserError.
    """
    # lazily, because training on prepared shards needs none of its packages
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # a line per file is enough, also in a log
    for failures in itertools.count():
        try:
            hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=folder)
            return
        except Exception as error:
            if isinstance(error, OSError) and error.errno:  # of the disk, not of the network
                raise
            problem = f"{REPOSITORY}: {name}"
            if is_first:
                ways = "check the network, unset HF_TOKEN if it has expired, or get the files on "
                ways += "another machine (docs/fast_recipe.md)"
                raise UserError(f"{problem}: {one_line(error)}; {ways}") from None
            wait_or_raise(problem, error, failures)
