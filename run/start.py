"""
Decide how a run starts: read the command, find the checkpoint or the weights that it begins with,
settle its configuration, and open its data. In the run's folder, only the lock is touched here.

With several ranks, each of them does all of this for itself. What they find must be the same
everywhere; ranks.join() ends the run if it is not.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from common.console import UserError, raise_if_any
from common.process import is_main, world_size
from configurator import FIELDS, NOT_WEIGHTS, Config, config_from, read_config, resolve
from data.download import make_or_explain
from data.shards import Dataset, check_dataset, open_dataset
from data.tokenizer import same_tokenizer
from machine import hardware
from model_fast import FastConfig
from run import checkpoint
from run.checkpoint import RunFolder, State
from run.clock import training_hours

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
# Keys of how a run trains. With other values a complete run's command asks for another run
HYPERPARAMETERS = frozenset(
    """
    dropout learning_rate muon_momentum weight_decay beta1 beta2 grad_clip
    lr_schedule decay_fraction warmup_iters min_lr
    """.split()
)


def choose_run(argv: list[str]) -> tuple[Config, State, RunFolder]:
    """
    Read the command. Returns the configuration that it and the checkpoint or weights ask for, what
    the run begins with, and the run's folder. Raises UserError, with a line for each problem.
    """
    c = read_config(argv)
    folder = RunFolder(Path(c.out_dir), c.keep_checkpoints)
    if is_main() and not c.eval_only and (folder.path / "lock").exists():
        folder.lock()  # from now on, no other run changes its checkpoints
    state = find_checkpoint(c)
    before = None
    if state.is_run:
        before = config_from(state.config)
        c, problems = config_of_resume(c, before)
        problems += length_problems(c, before, state)
    else:
        c, state, problems = config_of_weights(c)
    c, impossible = resolve(c, world_size(), before)
    problems += impossible
    try:
        hardware.check_device(c)
    except UserError as error:
        problems += error.args
    raise_if_any(problems)
    return c, state, folder


def find_checkpoint(c: Config) -> State:
    """
    Return the newest valid checkpoint of out_dir's run, or State() if a new run begins there, or if
    --eval_only evaluates the weights that init_from names. Raises UserError if out_dir holds other
    checkpoints, or none and init_from=resume asks for one.
    """
    out_dir = Path(c.out_dir)
    if c.eval_only and c.init_from not in NOT_WEIGHTS:
        return State()
    if found := checkpoint.load_first(out_dir, checkpoint.newest_first):
        state, path = checkpoint.state_of(*found), found[0]
        if not state.is_run:
            raise UserError(f"{path}: is not a checkpoint of this program; move it away")
        return state
    if others := sorted(out_dir.glob("*.pt")):  # such as nanoGPT's ckpt.pt
        hint = f"--init_from={others[-1]} --out_dir=NEW starts a new run from its weights"
        raise UserError(f"out_dir: {others[-1]} is from another program or run; {hint}")
    if c.init_from == "resume":
        hint = "is its disk mounted? Without --init_from=resume, a new run begins"
        raise UserError(f"init_from: {c.out_dir} holds no checkpoint to resume; {hint}")
    return State()


# -----------------------------------------------------------------------------
# What the checkpoint or the weights decide


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


def length_problems(c: Config, before: Config, state: State) -> list[str]:
    """
    Return the problem if the resume of an unfinished run asks for fewer hours than it has trained
    for, or for fewer iterations than it has done, because it would end without decaying the
    learning rate.
    """
    hours, it = training_hours(state.ledger), state.progress.iter_num
    to_end = "to end soon with a decayed learning rate, give"
    if c.eval_only or state.progress.complete:
        return []
    if c.hours != before.hours and 0 < c.hours <= hours:
        problem = f"{c.out_dir} has trained for {hours:.2f} hours, you asked for {c.hours:g}"
        return [f"hours: {problem}; {to_end} --hours={hours + 0.5:.1f}"]
    if c.max_iters < it:
        problem = f"{c.out_dir} has done {it:,} iterations, you asked for {c.max_iters:,}"
        return [f"max_iters: {problem}; {to_end} --max_iters={it + it // 10 + 1}"]
    return []


def config_of_weights(c: Config) -> tuple[Config, State, list[str]]:
    """
    Load the weights that init_from names, if it does. Returns the configuration with their sizes,
    what the run begins with, and the problems. Raises UserError.
    """
    if c.init_from in NOT_WEIGHTS:
        return c, State(), []
    from run.pretrained import load_pretrained  # only here, because few runs need it

    state = load_pretrained(c.init_from, c.block_size if "block_size" in c.set_keys else None)
    sizes = state.model_config
    saved = {name: sizes.get(name, FIELDS[name].default) for name in ARCHITECTURE}
    if sizes["vocab_size"] % c.pad_vocab_multiple:  # loaded weights get no new rows
        saved |= dict(pad_vocab_multiple=1)
    c, problems = keep_values(c, saved, c.init_from, "--init_from")
    return c, state, problems


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


def changes(c: Config, state: State) -> dict[str, Any]:
    """Return what the checkpoint had for each key that now has another value."""
    before = vars(config_from(state.config))
    return {name: before[name] for name in FIELDS if getattr(c, name) != before[name]}


def check_complete(c: Config, state: State) -> None:
    """Raise UserError if the command of a complete run asks for another run."""
    asked = [
        f"{name} = {getattr(c, name)!r} (it had {before!r})"
        for name, before in changes(c, state).items()
        if name in HYPERPARAMETERS
    ]
    if asked:
        problem = f"{c.out_dir} holds a complete run, but the command has {', '.join(asked)}"
        raise UserError(f"out_dir: {problem}; give another --out_dir")


def origin_lines(c: Config, state: State) -> list[str]:
    """
    Say from which checkpoint or weights a run begins, and which keys differ from the checkpoint's.
    """
    if not state.source and c.eval_only:
        return [f"eval_only: {c.out_dir} holds no checkpoint; this model is untrained"]
    if not state.source:
        return [f"new run: {c.out_dir} holds no checkpoint"]
    if not state.is_run:
        return [f"weights: {state.source}"]
    first = "" if c.init_from in NOT_WEIGHTS else f"; the run began from {c.init_from}"
    lines = [f"resume: {state.source}, iteration {state.progress.iter_num:,}{first}"]
    if c.eval_only:
        return lines
    changed = changes(c, state)
    for name, before in changed.items():
        lines.append(f"resume: {name} = {getattr(c, name)!r} (the checkpoint had {before!r})")
    if changed.keys() & HYPERPARAMETERS:
        lines.append("resume: for a new run with these values, give another --out_dir")
    return lines


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


def check_data(c: Config, data: Dataset, state: State) -> None:
    """Raise UserError if the data do not match what the run begins with."""
    if state.source:
        check_tokens("dataset", data, state, state.source)
    if state.is_run and state.data_fingerprint != data.fingerprint:
        trained = f"what {c.out_dir} was trained on ({state.config['dataset']})"
        change = "or has changed since; for a new run give another --out_dir"
        raise UserError(f"dataset: {data.source} is not {trained}, {change}")


def check_tokens(key: str, data: Dataset, known: State | Dataset, source: str) -> None:
    """Raise UserError if the dataset of this key has other tokens than `known`, from `source`."""
    hint = f"prepare the text with the tokenizer of {source}"
    theirs, ours = known.tokenizer, data.tokenizer
    if not same_tokenizer(theirs, ours):
        kinds = f"a different tokenizer ({ours['kind']}) from {source} ({theirs['kind']})"
        raise UserError(f"{key}: {data.source} has {kinds}; {hint}")
    if known.vocab < data.vocab:
        ids = f"{data.vocab} token ids, but {source} knows only {known.vocab}"
        raise UserError(f"{key}: {data.source} has {ids}; {hint}")
