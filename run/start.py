"""
Decide how a run starts: read the command, find the checkpoint or the weights that it begins with,
settle its configuration, and open its data. In the run's folder, only the lock is touched here.

With several ranks, each of them does all of this for itself. What they find must be the same
everywhere; ranks.join() ends the run if it is not.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from common.console import UserError, raise_if_any
from common.process import is_main, world_size
from configurator import FIELDS, NOT_WEIGHTS, Config, read_config, resolve
from data.download import make_or_explain
from data.shards import Dataset, check_dataset, open_dataset
from data.tokenizer import same_tokenizer
from machine import hardware
from model_fast import FastConfig
from run import checkpoint
from run.checkpoint import RunFolder
from run.clock import training_hours
from run.pretrained import check_fields, load_pretrained

# What a resume does with the keys. Most get the command's values, or their defaults.

# The models' fields come from the checkpoint, or the weights, that a run begins with. A resume may
# change these three, because a validation loss does not depend on them, apart from rounding
FREE_ON_RESUME = frozenset({"dropout", "flash", "loss_chunk"})
ARCHITECTURE = (
    "model",
    *(f.name for f in fields(FastConfig) if f.name in FIELDS and f.name not in FREE_ON_RESUME),
)
# Keys that a resumed run keeps; setting one to another value is an error. Add a key here if
# changing that key would invalidate the saved state
FIXED_ON_RESUME = (*ARCHITECTURE, "pad_vocab_multiple", "optimizer", "seed", "init_from")
# Keys that a resumed run keeps unless the command sets them, as it keeps the dtype that auto meant.
# The three of the batch may only change so that an iteration has as many tokens as before
KEPT_UNLESS_SET = (
    "dataset",
    "batch_size",
    "gradient_accumulation_steps",
    "tokens_per_iter",
    "eval_tokens",
)


@dataclass
class Progress:
    """Records how far a run has come. The loop updates this, and checkpoints store it."""

    iter_num: int = 0  # iterations done, including those whose update was skipped
    tokens: int = 0  # tokens trained on; divided by block_size, the position in the data order
    val_loss: float | None = None  # validation loss of the current weights, None: not evaluated
    complete: bool = False  # whether the run was over, so that these weights are final
    saved: bool = False  # whether a checkpoint holds these weights with their val_loss

    def advance(self, tokens: int) -> None:
        """Count an iteration that trained on so many tokens."""
        self.iter_num += 1
        self.tokens += tokens
        self.val_loss, self.complete, self.saved = None, False, False

    def record(self, val_loss: float) -> None:
        """Record an evaluation of the current weights."""
        self.val_loss, self.saved = val_loss, False


def choose_run(argv: list[str]) -> tuple[Config, dict, RunFolder]:
    """
    Read the command. Returns the configuration that it and the checkpoint or weights ask for, what
    the run begins with: the checkpoint to continue, which has its `progress`, or weights as
    load_pretrained() returns them, or {}; and the run's folder. Raises UserError, with a line for
    each problem.
    """
    c = read_config(argv)
    folder = RunFolder(Path(c.out_dir), c.keep_checkpoints)
    if is_main() and not c.eval_only and (folder.path / "lock").exists():
        folder.lock()  # from now on, no other run changes its checkpoints
    loaded = find_checkpoint(c)
    before = None
    problems: list[str] = []
    if loaded:
        before = config_before(loaded)
        c, problems = config_of_resume(c, before)
        problems += hours_problems(c, before, training_hours(loaded["ledger"]))
    else:
        c, loaded, problems = config_of_weights(c)
    c, impossible = resolve(c, world_size(), before)
    problems += impossible
    try:
        hardware.check_device(c)
        hardware.check_gpu(c)
    except UserError as error:
        problems += error.args
    raise_if_any(problems)
    return c, loaded, folder


def find_checkpoint(c: Config) -> dict:
    """
    Return the newest valid checkpoint of out_dir's run, with its path as `source`, or {} if a new
    run begins there, or if --eval_only evaluates the weights that init_from names. Raises UserError
    if out_dir holds other checkpoints, or none and init_from=resume asks for one.
    """
    out_dir = Path(c.out_dir)
    if c.eval_only and c.init_from not in NOT_WEIGHTS:
        return {}
    if state := checkpoint.read_first(out_dir, checkpoint.newest_first):
        path = Path(state["source"])
        if "progress" not in state:
            raise UserError(f"{path}: is not a checkpoint of this program; move it away")
        check_fields(path, state)
        it = state["progress"]["iter_num"]
        if it != checkpoint.iteration(path):
            raise UserError(f"{path}: holds iteration {it}, so its name is wrong; rename it")
        return state
    if others := sorted(out_dir.glob("*.pt")):  # such as nanoGPT's ckpt.pt
        hint = f"--init_from={others[-1]} --out_dir=NEW starts a new run from its weights"
        raise UserError(f"out_dir: {others[-1]} is from another program or run; {hint}")
    if c.init_from == "resume":
        hint = "is its disk mounted? Without --init_from=resume, a new run begins"
        raise UserError(f"init_from: {c.out_dir} holds no checkpoint to resume; {hint}")
    return {}


# -----------------------------------------------------------------------------
# What the checkpoint or the weights decide


def config_before(loaded: dict) -> Config:
    """Return the configuration of a checkpoint's run. Keys that it lacks get their defaults."""
    return Config(**{n: v for n, v in loaded["config"].items() if n in FIELDS})


def config_of_resume(c: Config, before: Config) -> tuple[Config, list[str]]:
    """Return the configuration with what the resumed run keeps, and the problems."""
    if c.init_from in NOT_WEIGHTS:  # the run keeps the one that began it
        c = replace(c, init_from=before.init_from)
    saved = {name: getattr(before, name) for name in FIXED_ON_RESUME}
    c, problems = keep_values(c, saved, c.out_dir, "--out_dir for a new run")
    kept = {n: getattr(before, n) for n in KEPT_UNLESS_SET if n not in c.set_keys}
    if c.dtype == "auto":
        kept |= dict(dtype=before.dtype)
    return replace(c, **kept), problems


def hours_problems(c: Config, before: Config, hours: float) -> list[str]:
    """
    Return the problem if a resume asks for fewer hours than the run has trained for, because the
    learning rate would stay where it is.
    """
    if c.eval_only or c.hours == before.hours or not 0 < c.hours <= hours:
        return []
    problem = f"{c.out_dir} has trained for {hours:.2f} hours, you asked for {c.hours:g}"
    hint = f"to end soon with a decayed learning rate, give --hours={hours + 0.5:.1f}"
    return [f"hours: {problem}; {hint}"]


def config_of_weights(c: Config) -> tuple[Config, dict, list[str]]:
    """
    Load the weights that init_from names, if it does. Returns the configuration with their sizes,
    the weights as load_pretrained() returns them, or {}, and the problems. Raises UserError.
    """
    if c.init_from in NOT_WEIGHTS:
        return c, {}, []
    loaded = load_pretrained(c.init_from, c.block_size if "block_size" in c.set_keys else None)
    sizes = loaded["model_config"]
    saved = {name: sizes.get(name, FIELDS[name].default) for name in ARCHITECTURE}
    if sizes["vocab_size"] % c.pad_vocab_multiple:  # loaded weights get no new rows
        saved |= dict(pad_vocab_multiple=1)
    c, problems = keep_values(c, saved, c.init_from, "--init_from")
    return c, loaded, problems


def keep_values(c: Config, saved: dict, source: str, other: str) -> tuple[Config, list[str]]:
    """
    Return the configuration with the saved values of these keys, and a problem for each key that a
    file or flag sets to something else.
    """
    problems = [
        f"{name}: {source} has {value!r}, you asked for {getattr(c, name)!r}. "
        f"Give --{name}={value}, or another {other}"
        for name, value in saved.items()
        if name in c.set_keys and getattr(c, name) != value
    ]
    return replace(c, **saved), problems


# -----------------------------------------------------------------------------
# The data


def open_data(c: Config, key: str = "dataset") -> Dataset:
    """
    Open the dataset that this key names; make or download it first if the program can. Raises
    UserError if it is missing or too short.
    """
    make_or_explain(c, key)
    data = open_dataset(getattr(c, key))
    check_dataset(data, c.block_size)
    return data


def check_data(c: Config, data: Dataset, loaded: dict) -> None:
    """Raise UserError if the data do not match what the run begins with."""
    if not loaded:
        return
    check_tokens("dataset", data, loaded, loaded["source"])
    if loaded.get("data_fingerprint", data.fingerprint) != data.fingerprint:
        trained = f"what {c.out_dir} was trained on ({loaded['config']['dataset']})"
        change = "or has changed since; for a new run give another --out_dir"
        raise UserError(f"dataset: {data.source} is not {trained}, {change}")


def check_tokens(key: str, data: Dataset, known: dict, source: str) -> None:
    """
    Raise UserError if the dataset of this key has other tokens than `source`, whose tokenizer and
    vocab are `known`: a checkpoint, weights, or another dataset's facts().
    """
    hint = f"prepare the text with the tokenizer of {source}"
    theirs, ours = known["tokenizer"], data.tokenizer
    if not same_tokenizer(theirs, ours):
        kinds = f"a different tokenizer ({ours['kind']}) from {source} ({theirs['kind']})"
        raise UserError(f"{key}: {data.source} has {kinds}; {hint}")
    if known["vocab"] < data.vocab:
        ids = f"{data.vocab} token ids, but {source} knows only {known['vocab']}"
        raise UserError(f"{key}: {data.source} has {ids}; {hint}")
