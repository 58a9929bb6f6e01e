"""
Download the fast recipe's dataset: FineWeb in GPT-2's tokens, the shards of the public runs.

The hub's library finds the files, but we fetch them: its own downloads compare only sizes, take two
minutes to say that there is no network, and would keep other ranks waiting in one collective.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, get_session, hf_hub_url
from tqdm import tqdm

from common.console import UserError, one_line, say
from common.files import (
    lack_of_space,
    patiently,
    remove_temporaries,
    replacing,
    try_lock,
    warn_once,
)
from data.files import HUB_TIMEOUT, is_refused
from data.missing import shards_to_download
from data.text import wait_or_raise

REPOSITORY = "kjj0/fineweb10B-gpt2"
SHARD_BYTES = 2 * 10**8
PIECE = 2**20  # bytes


def download(folder: Path, tokens: int) -> Iterator[None]:
    """
    Download the validation shard and as many training shards as `tokens` need. The folder appears
    once it is complete. Until then the finished files are in a folder beside it, where the next
    call continues. Yields after every piece and every second of waiting for another process.
    Raises UserError.
    """
    shards = shards_to_download(tokens)
    names = [f"fineweb_{'train' if n else 'val'}_{n:06}.bin" for n in range(shards + 1)]
    part = folder.with_name(f"{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.tmp"), "wb") as lock:
        while not try_lock(lock):
            warn_once(f"{folder}: another run is downloading it; waiting")
            time.sleep(1)
            yield
        if folder.exists():
            return
        part.mkdir(exist_ok=True)
        remove_temporaries(part, "*")
        missing = [name for name in names if not (part / name).exists()]
        total, left = SHARD_BYTES * len(names), SHARD_BYTES * len(missing)
        if problem := lack_of_space(part, left):
            raise UserError(f"{problem}; make room, then repeat the command")
        say(
            f"data: downloading {left / 1e9:.1f} GB of FineWeb to {folder.absolute()}; "
            "if that is interrupted, the same command continues"
        )
        # disable=None shows the bar on a terminal only
        bar = tqdm(total=total, initial=total - left, unit="B", unit_scale=True, disable=None)
        with bar:
            for number, name in enumerate(missing, 1 + len(names) - len(missing)):
                bar.set_description(f"file {number} of {len(names)}")
                for size in fetch(name, part, has_received=name != missing[0]):
                    bar.update(size)
                    yield
                if bar.disable:
                    done = f"{number * SHARD_BYTES / 1e9:.1f} of {total / 1e9:.1f} GB"
                    say(f"data: file {number} of {len(names)}, {done}")
        patiently(os.rename, part, folder)


class WrongBytes(Exception):
    """Raised for a file whose SHA-256 is not the hub's."""


def fetch(name: str, folder: Path, has_received: bool) -> Iterator[int]:
    """
    Download a file, which appears once it is complete and has the hub's SHA-256. If the SHA-256
    differs, download it once more. Yields each piece's size in bytes. Raises UserError.
    """
    url, path = hf_hub_url(REPOSITORY, name, repo_type="dataset"), folder / name
    try:
        for _ in range(2):
            with contextlib.suppress(WrongBytes), replacing(path) as file:
                for piece in pieces(url, has_received):
                    file.write(piece)
                    yield len(piece)
                return
    except OSError as error:
        fixed = "once that is fixed, the same command continues"
        raise UserError(f"{path}: {error.strerror}; {fixed}") from None
    hint = "log in to the network if it asks for that, then repeat the command"
    raise UserError(f"{url}: what arrives is not the hub's file (SHA-256); {hint}")


def pieces(url: str, has_received: bool) -> Iterator[bytes]:
    """
    Yield a hub file's bytes in pieces. If the network fails, wait and then continue at the same
    byte. Raises UserError, also after an hour of waiting, and WrongBytes at the end. Before
    this launch `has_received` anything, gives up after half a minute if the hub answers with an
    error, and at once if nobody answers.
    """
    digest = hashlib.sha256()
    received = failures = 0
    while True:
        try:
            file = get_hf_file_metadata(url, timeout=HUB_TIMEOUT)
            headers = {"Range": f"bytes={received}-", "Accept-Encoding": "identity"}
            with get_session().stream(
                "GET", file.location, headers=headers, timeout=HUB_TIMEOUT
            ) as response:
                response.raise_for_status()
                for piece in response.iter_bytes(PIECE):
                    digest.update(piece)
                    yield piece
                    received, failures, has_received = received + len(piece), 0, True
            break
        except Exception as error:
            problem = f"{url}: {one_line(error)}"
            hint = "docs/fast_recipe.md says how to get the files on another machine"
            # an address expires in the middle of a download; asking again gets a new one
            if is_refused(error) and (failures or not has_received):
                raise UserError(f"{problem}; {hint}") from None
            if not has_received and not hasattr(error, "response"):
                raise UserError(f"{problem}; check the network; {hint}") from None
            wait_or_raise(url, error, failures, has_received)
            failures += 1
            yield b""  # let the ranks that wait for this one hear of it
    if digest.hexdigest() != file.etag:
        raise WrongBytes
