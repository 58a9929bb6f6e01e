"""
Where a run starts: from scratch, from its newest checkpoint, or from weights trained elsewhere; and
on which data.

`start` is a dict: a checkpoint's state, or weights trained elsewhere as load_pretrained() returns
them, or empty from scratch. Only a checkpoint to resume has the key "progress".
"""

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

from common.console import UserError, did_you_mean, raise_if_any, say, warn
from configurator import (
    INITIAL,
    NEVER,
    Config,
    config_values,
    decays,
    read_config,
    resolve,
    translate,
)
from data.shards import Dataset, check_dataset, dataset_folder, is_made_on_demand, open_dataset
from data.stream import open_stream
from model import FREE_ON_RESUME, GPTConfig
from training import checkpoint, hardware
from training.build import build_shapes, check_optimizer, model_config, optimizer_groups
from training.checkpoint import find_newest, holds_run, in_the_way, list_checkpoints
from training.pretrained import load_pretrained
from training.ranks import Ranks, check_gpus, check_shares, lost_rank
from training.runlog import RunLog
from training.state import check_checkpoint

# vocab_size is not a key; it follows from the dataset
ARCHITECTURE = [f.name for f in fields(GPTConfig) if f.name not in FREE_ON_RESUME | {"vocab_size"}]
# A resumed run must keep these
FIXED_ON_RESUME = [*ARCHITECTURE, "pad_vocab_multiple", "optimizer", "seed", "stream"]


# -----------------------------------------------------------------------------
# Finding and checking, by rank 0 for all


def prepare(argv: list[str], world_size: int) -> tuple[Config, Path | None]:
    """
    The configuration of a command line, with the keys that a checkpoint or the weights decide, and
    the checkpoint to resume from, if any. Raises a UserError with all problems: of the command
    line, or else of the start, the device, the dataset and the keys together.
    """
    config, problems = read_config(argv)
    raise_if_any(problems + check_optimizer(config))
    out_dir, path = Path(config.out_dir), None
    try:
        if (out_dir / "lock").exists() and not config.eval_only:
            checkpoint.lock_folder(out_dir)  # or another run could change what is read below
        path = find_checkpoint(config)
        config, problems = adopt(config, load_start(config, path))
    except UserError as error:
        problems = error.problems
    problems += hardware.check_device(config)
    problems += [] if config.stream else check_dataset(config)
    problems += resolve(config) + check_shares(config, world_size) + check_gpus(config)
    raise_if_any(problems)
    # Muon may ask for a weight's role, with any vocabulary
    optimizer_groups(build_shapes(model_config(config, 1)), config)
    if config.dtype == "auto":  # rank 0 chooses for all
        dtype, reason = hardware.best_dtype(hardware.choose_device(config))
        config.dtype = str(dtype).removeprefix("torch.")
        say(f"dtype: {config.dtype}, because {reason}")
    return config, path


def explain(error: Exception, argv: list[str]) -> str:
    """The error line for an exhausted memory or a lost rank; empty for other errors."""
    if not hardware.is_out_of_memory(error):
        return lost_rank(error)
    config, _ = read_config(argv)
    saved = list_checkpoints(Path(config.out_dir))
    if saved and config.init_from in ("resume", "auto"):
        config, _ = adopt(config, load_start(config, saved[-1]))
    resolve(config)
    return hardware.out_of_memory_line(config, int(os.environ.get("WORLD_SIZE", 1)))


def find_checkpoint(config: Config) -> Path | None:
    """
    The newest checkpoint of the run to resume, checked. None for a new run. Raises UserError if
    there is none to resume, or if the folder of a new run holds another run.
    """
    out_dir = Path(config.out_dir)
    if config.init_from not in ("resume", "auto"):
        if holds_run(out_dir) and (config.init_from == "scratch" or not config.eval_only):
            raise UserError(in_the_way(out_dir))
        return None
    if found := find_newest(out_dir, check_checkpoint):
        return found[0]
    # best.pt alone, a checkpoint under another name, or nanoGPT's
    if others := sorted(out_dir.glob("*.pt")):
        hint = f"--init_from={others[0]} with another --out_dir starts from its weights"
        if progress := checkpoint.load(others[0]).get("progress"):
            number = progress["iter_num"]
            hint = f"copy it to {checkpoint.checkpoint_path(out_dir, number)} to resume, or {hint}"
        raise UserError(f"init_from: {others[0]} cannot be resumed, only ckpt-*.pt; {hint}")
    if config.init_from == "resume":
        runs = [path.name for path in out_dir.parent.glob("*") if list_checkpoints(path)]
        hint = f"--init_from=auto starts a new run there{did_you_mean(out_dir.name, runs)}"
        if out_dir.is_file():
            hint = f"it is a file; --out_dir={out_dir.parent} is its folder"
        raise UserError(f"init_from: {out_dir} holds no checkpoint to resume; {hint}")
    if holds_run(out_dir):
        hint = "restore them, or give another --out_dir"
        raise UserError(f"out_dir: {out_dir} holds the log of a run, but no checkpoint; {hint}")
    if (out_dir / "metrics.jsonl").exists():
        say(f"{out_dir}: an earlier launch ended before its first save; starting from scratch")
    return None


def load_start(config: Config, path: Path | None) -> dict:
    """
    What the run starts from (see above). `path`: the checkpoint to resume, checked by rank 0.
    """
    if path:
        state = checkpoint.read(path)
        return state | dict(config=translate(state["config"]))
    if config.init_from in ("scratch", "auto"):
        return {}
    block_size = config.block_size if "block_size" in config.given else None
    return load_pretrained(config.init_from, block_size)


def adopt(config: Config, start: dict) -> tuple[Config, list[str]]:
    """
    The configuration with the saved architecture and, on resume, the other keys that must not
    change; and a problem if a file or flag sets any of them to something else.
    """
    if not start:
        return config, []
    saved, names, source = start["model_config"], ARCHITECTURE, config.init_from
    if "progress" in start:
        saved, names, source = start["config"], FIXED_ON_RESUME, config.out_dir
        kept = [n for n in ("dataset", "tokenizer") if n in saved and n not in config.given]
        kept += ["dtype"] if config.dtype == "auto" else []  # the type that the run started with
        config = replace(config, **{name: saved[name] for name in kept})
    elif (
        saved["vocab_size"] % config.pad_vocab_multiple
    ):  # loaded weights keep their rows: no padding
        saved, names = saved | dict(pad_vocab_multiple=1), [*names, "pad_vocab_multiple"]
    # an older checkpoint may not have all keys
    values = {name: saved.get(name, getattr(Config, name)) for name in names}
    different = [
        f"{name} {value!r} (asked for: {getattr(config, name)!r})"
        for name, value in values.items()
        if name in config.given and getattr(config, name) != value
    ]
    other = "--out_dir" if "progress" in start else "--init_from"
    problem = f"init_from: {source} has {', '.join(different)}; use its values, or another {other}"
    return replace(config, **values), [problem] if different else []


def check_folder(config: Config, path: Path | None, best_iter: int, log: RunLog) -> None:
    """
    Raises UserError if a rank's machine does not see the run's folder. `path`: the checkpoint to
    resume; if it is the best one, and a kill prevented that before, it becomes best.pt.
    """
    if config.eval_only:
        return
    lock = Path(config.out_dir) / "lock"
    seen = log.owner
    if not log.ranks.is_main:  # rank 0 would unlock it if it read it
        seen = lock.read_text("utf-8") if lock.exists() else "missing"
    log.ranks.check_same(str(lock), seen, "several machines need one shared --out_dir")
    if path and log.ranks.is_main and path == checkpoint.checkpoint_path(lock.parent, best_iter):
        best = path.with_name("best.pt")
        try:
            if not best.exists() or best.stat().st_mtime < path.stat().st_mtime:
                checkpoint.mark_best(path)
        except OSError as error:
            warn(f"{best}: {error.strerror}; it is not yet the model of {path}")


# -----------------------------------------------------------------------------
# Messages at the start


def is_finished(config: Config, start: dict) -> bool:
    """
    Whether the resumed run has nothing left to do, with a message. Raises UserError if it was
    trained on other data than it is given now.
    """
    if "progress" not in start or config.eval_only:
        return False
    iter_num, evaluated_at = (start["progress"][name] for name in ("iter_num", "evaluated_at"))
    changed, end = changed_keys(config, start), config.max_iters
    if config.by_clock and not {"hours", "until", "max_iters"}.intersection(changed):
        end = iter_num if start.get("clock", {}).get("share", 0) >= 1 else NEVER
    if min(iter_num, evaluated_at) < end:
        return False
    if not (config.stream or is_made_on_demand(config)):
        check_data(config, start, open_dataset(config.dataset))
    elif "dataset" in changed:
        raise UserError(other_data(config, start, config.dataset))
    key = "until" if config.until else "hours" if config.hours else "max_iters"
    done = f"all {iter_num:,} iterations are done; to continue, give another --{key}"
    say(f"{config.out_dir}: {done}; for a new run, another --out_dir")
    return True


def changed_keys(config: Config, start: dict) -> dict:
    """
    The keys whose value has changed since the checkpoint, with the checkpoint's value. Keys that
    are not in the checkpoint count as defaults.
    """
    values, saved = config_values(config), config_values(Config()) | start["config"]
    return {n: saved[n] for n in values if saved[n] != values[n] and n not in INITIAL}


def say_start(config: Config, start: dict, ranks: Ranks) -> None:
    """Print where this run begins, and how it differs from the checkpoint."""
    if "progress" not in start:
        if start:
            rest = "" if config.eval_only else "; iterations and learning rate start from 0"
            say(f"weights: {start['source']}{rest}")
        elif config.eval_only and ranks.is_main:
            warn(f"eval_only: {config.out_dir} holds no checkpoint; this model is untrained")
        return
    iter_num = start["progress"]["iter_num"]
    end = f"of {config.max_iters:,}"
    if config.by_clock:
        used = sum(start["ledger"].values())
        end = f"after {used / 3600:.2f} hours; by the clock, not bit for bit the same run"
        if 0 < 3600 * config.hours <= used and ranks.is_main:
            warn(f"hours: {config.hours:g} are for all launches and used already; the run ends now")
    path = checkpoint.checkpoint_path(config.out_dir, iter_num)
    say(f"resume: {path}, iteration {iter_num:,} {end}")
    for name, before in changed_keys(config, start).items():
        value, rest = getattr(config, name), ""
        if name == "max_iters" and not config.lr_decay_iters and decays(config):
            end = start["config"].get("lr_decay_iters") or before
            rest = f"; the schedule ends there too, and --lr_decay_iters={end} keeps the old end"
        if NEVER not in (before, value):
            say(f"resume: {name} = {value!r} (the checkpoint had {before!r}){rest}")
    if unknown := start["config"].keys() - config_values(config).keys():
        say(f"resume: these are no longer keys and are ignored: {', '.join(sorted(unknown))}")


# -----------------------------------------------------------------------------
# Data


def prepare_on_demand(config: Config) -> None:
    """Make the quickstart's dataset if it is missing: the one dataset that needs no download."""
    if config.stream or not is_made_on_demand(config):
        return
    folder = dataset_folder(config.dataset)
    say(f"data: preparing {folder} from Python's own source files")
    script = Path(__file__).parent.parent / "data" / "prepare_text.py"
    command = [sys.executable, str(script), f"--out={folder}"]
    # hide its output, which ends with a command to type next
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"dataset: {script} failed; see its message above")
    raise_if_any(check_dataset(config))


def open_data(config: Config, start: dict, ranks: Ranks) -> Dataset:
    """
    The configured dataset: a folder, or a stream, which rank 0 prepares for all. Raises UserError
    if it is not the one that the checkpoint or the weights were trained on.
    """
    ranks.from_main(prepare_on_demand, config)
    if start.get("stream"):
        problem = f"stream: {config.out_dir} streamed with an earlier version, which kept no shards"
        hint = "its ckpt-*.pt as --init_from, with another --out_dir, gives a new run its weights"
        raise UserError(f"{problem}; {hint}")
    if config.stream:
        data = open_stream(config, ranks, start.get("shards_read", []))
    else:
        data = open_dataset(config.dataset)
    ranks.from_main(check_data, config, start, data)
    ranks.check_same("dataset", data.fingerprint, "give all machines the same files")
    return data


def other_data(config: Config, start: dict, source: str) -> str:
    """The error line for a run that is resumed with other data than it was trained on."""
    theirs = f"{config.out_dir} was trained on ({start['config']['dataset']})"
    hint = "or has changed since; for a new run give another --out_dir"
    return f"dataset: {source} is not what the run in {theirs}, {hint}"


def check_data(config: Config, start: dict, data: Dataset) -> None:
    """Raises UserError if the data are not those of the checkpoint or of the weights."""
    if not start:
        return
    resumed, theirs = "progress" in start, start["tokenizer"]
    if "unknown" not in (theirs["kind"], data.tokenizer["kind"]) and theirs != data.tokenizer:
        held = f"dataset: {data.source} has the tokenizer {data.tokenizer['kind']}"
        holder = config.out_dir if resumed else f"init_from={config.init_from}"
        known = f"the weights of {holder} another one, {theirs['kind']}"
        hint = "for a new run give another --out_dir" if resumed else "give data that has that one"
        raise UserError(f"{held}, {known}; {hint}")
    if resumed and start["data_fingerprint"] != data.fingerprint:
        raise UserError(other_data(config, start, data.source))
    if start["vocab"] < data.vocab:
        known = f"the weights of init_from={config.init_from} only {start['vocab']}"
        hint = "give a dataset made with their tokenizer"
        raise UserError(f"dataset: it has {data.vocab} token ids, {known}; {hint}")
