"""
Help where a dataset is missing: make the quickstart's, download the fast recipe's, say how to get
another, and name the vocabulary size to plan and measure with until then.
"""

import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from common.console import (
    COMMAND,
    Unreachable,
    UserError,
    command_line,
    count,
    did_you_mean,
    one_line,
    say,
)
from common.files import lack_of_space, patiently, try_lock
from configurator import Config
from data.files import is_refused
from data.shards import dataset_folder, read_manifest, split_of
from data.text import with_retries
from data.tokenizer import BYTE_VOCAB, GPT2_VOCAB

# The most tokens that a message or plan suggests preparing: FineWeb-Edu's 10B sample; with --hours
# and an unknown speed, a little more than an RTX 4070 reads in a night.
MOST_TOKENS = 10**10
HOURS_TOKENS = 2 * 10**9
# FineWeb's validation shard and its training shards, 103 of 100M tokens or the first 19
DOWNLOADED_ON_DEMAND = "fineweb_records"
REPOSITORY = "kjj0/fineweb10B-gpt2"
SHARDS, FIRST_SHARDS, SHARD_BYTES = 103, 19, 2 * 10**8
PREPARED_ON_DEMAND = "python_stdlib"  # the quickstart's dataset, which train.py makes itself


def make_or_explain(config: Config, key: str = "dataset") -> None:
    """
    Make the dataset that this key names if it is the quickstart's, download the fast recipe's, or
    raise Unreachable if another is missing, with the commands that get or make it.
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
        raise Unreachable(f"{key}: {folder} is a link to nothing; is its disk mounted?")
    elif name == DOWNLOADED_ON_DEMAND and not folder.is_dir():
        download(folder, run_tokens(config))
    elif not folder.is_dir() or (config.stream and not is_begun(folder)):
        raise Unreachable(f"{key}: {explanation(config, key, folder)}")


def run_tokens(config: Config) -> int:
    """Return how many tokens a run reads; with hours, a guess."""
    return HOURS_TOKENS if config.by_clock else config.iter_tokens * config.max_iters


def download(folder: Path, tokens: int) -> None:
    """
    Download as many of the records as `tokens` need. The folder appears once it is complete; until
    then the files are in a folder beside it, where the next call continues. Raises UserError.
    """
    shards = FIRST_SHARDS if tokens <= HOURS_TOKENS else SHARDS
    names = [f"fineweb_{'train' if n else 'val'}_{n:06}.bin" for n in range(shards + 1)]
    part = folder.with_name(f"{folder.name}.part")
    size = SHARD_BYTES * sum(not (part / name).exists() for name in names)
    if problem := lack_of_space(part, size):
        raise UserError(problem)
    say(
        f"data: downloading {size / 1e9:.1f} GB of FineWeb to {folder.absolute()}; "
        "if that is interrupted, the same command continues"
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.tmp"), "wb") as lock:
        while not try_lock(lock):  # another run downloads, for another GPU
            time.sleep(1)
        if folder.exists():
            return
        for name in names:
            if not (part / name).exists():
                url = f"hf://datasets/{REPOSITORY}/{name}"
                with_retries(url, partial(fetch, name, part), (part / names[0]).exists)
        shutil.rmtree(part / ".cache", ignore_errors=True)  # the library's notes
        patiently(os.rename, part, folder)


def fetch(name: str, part: Path) -> None:
    """Download one file of the records. Raises UserError if asking again cannot help."""
    # Xet, the library's other way to download, hangs behind some firewalls
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()  # it also retries by itself, with three lines each time
    try:
        hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=part)
    except Exception as error:
        reason: Any = error.__cause__ or error  # the library's own may say only that it failed
        if is_refused(reason):
            raise UserError(f"{name}: {one_line(reason)}") from None
        raise reason from None


def is_begun(folder: Path) -> bool:
    """Return whether a folder holds shards, or will hold them."""
    return any(p.name == "manifest.json" or split_of(p.name) for p in folder.iterdir())


def explanation(config: Config, key: str, folder: Path) -> str:
    """Say that the dataset of this key is missing, and how to get it."""
    name = getattr(config, key)
    tokens = run_tokens(config)
    if config.stream:
        return f"{name} is not a folder of shards; {both_commands(name, folder, tokens)}"
    problem = f"there is no folder {folder}"
    if folder == Path(name) and not folder.is_absolute():  # the user may be in the wrong folder
        problem += f" in {Path.cwd()}; cd to where it is"
    if name == "openwebtext":  # the default, so most likely nobody asked for it
        problem += ", the default; config/quickstart.py needs no data"
    made = [path.parent.name for path in Path("data").glob("*/*.bin")]
    if name == "shakespeare_char":
        ways = f"docs/own_text.md says how to make it, or give nanoGPT's with --{key}=PATH"
        return f"{problem}; {ways}"
    ways = f"give another folder, such as nanoGPT's, with --{key}=PATH, or get it with"
    return f"{problem}{did_you_mean(Path(name).name, made)}; {ways}{preparation(name, tokens)}"


def both_commands(name: str, folder: Path, tokens: int) -> str:
    """Return how to train on a folder while it is being prepared, for the end of a message."""
    how = "prepare shards in one terminal, and after the first one train in another"
    flags = ["data/prepare_fineweb.py", f"--tokens={count(min(tokens, MOST_TOKENS))}"]
    stream = ["--stream=True"]
    if Path(name).exists():  # files of text, whose validation text is spread over all of them
        how = "prepare the text, then train without --stream"
        flags, stream = ["data/prepare_text.py", name], []
        folder = Path("data", f"{Path(name).stem}_tokens")
    prepare = command_line("python", *flags, f"--out={folder}")
    train = command_line("python", "train.py", "CONFIG", f"--dataset={folder}", *stream)
    return f"{how}{COMMAND}{prepare}{COMMAND}{train}"


def preparation(name: str, tokens: int) -> str:
    """Return the command that gets or makes a missing dataset, for the end of a message."""
    fineweb = f"prepare_fineweb.py --tokens={count(min(tokens, MOST_TOKENS))}"
    command = fineweb if "fineweb" in name else "prepare_text.py FILE"
    out = f"--out={dataset_folder(name)}"
    return COMMAND + command_line("python", *f"data/{command}".split(), out)


def vocab_where_missing(config: Config) -> int | None:
    """
    Return the vocabulary size to plan and measure with before the dataset exists: the byte
    vocabulary for the quickstart's dataset, else GPT-2's. None if the dataset exists.
    """
    if dataset_folder(config.dataset).is_dir():
        return None
    return BYTE_VOCAB if config.dataset == PREPARED_ON_DEMAND else GPT2_VOCAB
