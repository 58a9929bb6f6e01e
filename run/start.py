"""
Decide how a run starts: read the command, find the checkpoint or the weights that it begins with,
settle its configuration, and open its data. In the run's folder, only the lock is touched here.

With several ranks, each of them does all of this for itself. What they find must be the same
everywhere; ranks.join() ends the run if it is not.
"""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from common.console import BELOW, UserError, raise_if_any, say
from common.process import is_main, world_size
from configurator import (
    FIELDS,
    NOT_WEIGHTS,
    Config,
    RunKeys,
    TrainingKeys,
    config_from,
    config_values,
    find_keys,
    problems_of,
    read_config,
    resolve,
)
from data.download import make_or_explain
from data.shards import Dataset, check_dataset, open_dataset
from data.tokenizer import same_tokenizer
from machine import hardware
from model_fast import FastConfig
from run import checkpoint
from run.checkpoint import RunFolder, State
from run.clock import training_hours


def choose_run(argv: list[str]) -> tuple[Config, State, RunFolder, list[str]]:
    """
    Read the command. Returns the configuration that it and the checkpoint or weights ask for, what
    the run begins with, the run's folder, and lines that say what was decided. Raises UserError,
    with a line for each problem.
    """
    new = read_config(argv)
    folder = RunFolder(Path(new.out_dir), only_reads=new.eval_only or not is_main())
    state = find_checkpoint(new)
    if state.is_run:
        before = config_from(state.config)
        c = config_of_run(argv, new, before)
        about = run_lines(resolve(new), c, before, state)
        problems = length_problems(c, before, state)
    else:
        c, state = config_of_weights(new)
        c = resolve(c)
        about = [f"weights: {state.source}"] if state.source else []
        problems = []
    problems += problems_of(c, world_size())
    try:
        hardware.check_device(c)
    except UserError as error:
        problems += error.args
    raise_if_any(problems)
    return c, state, folder, about


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
        path, state = found[0], checkpoint.state_of(*found)
        if not state.is_run:
            raise UserError(f"{path}: has no optimizer, so it cannot be resumed; move it away")
        if state.iter_num != checkpoint.iteration(path):
            name = checkpoint.checkpoint_name(state.iter_num)
            raise UserError(f"{path}: holds iteration {state.iter_num}; rename it to {name}")
        return state
    if others := sorted(out_dir.glob("*.pt")):  # such as nanoGPT's ckpt.pt
        hint = f"--init_from={others[-1]} --out_dir=NEW starts a new run from its weights"
        raise UserError(f"out_dir: {others[-1]} is from another program or run; {hint}")
    if c.init_from == "resume":
        hint = "is its disk mounted? Without --init_from=resume, a new run begins"
        raise UserError(f"init_from: {c.out_dir} holds no checkpoint to resume; {hint}")
    # at once, because whoever has mistyped out_dir may be refused for what a new run lacks
    begins = "this model is untrained" if c.eval_only else "a new run begins"
    say(f"{c.out_dir} holds no checkpoint: {begins}")
    return State()


# -----------------------------------------------------------------------------
# What the checkpoint or the weights decide


def config_of_run(argv: list[str], new: Config, before: Config) -> Config:
    """
    Return the configuration of a resumed run. The command is read again, with the run's values
    of the keys that it does not set (`new` is what it would begin a new run with); the classes of
    configurator.py say what happens to those that it sets. Raises UserError if it sets keys that
    the run keeps.
    """
    unset = FIELDS.keys() - new.set_keys - {"out_dir"}
    c = read_config(argv, kept={name: getattr(before, name) for name in unset})
    c = replace(c, out_dir=new.out_dir)  # also if a file computes it
    if c.init_from in NOT_WEIGHTS:  # names no weights, so the run keeps those that it began with
        c = replace(c, init_from=before.init_from)
    if c.dtype == "auto":  # means what it meant when the run began
        c = replace(c, dtype=before.dtype)
    may_change = new.init_from == "resume" or c.eval_only
    kept = [RunKeys] if may_change else [RunKeys, TrainingKeys]
    others = others_than(c, {name: getattr(before, name) for k in kept for name in find_keys(k)})
    ways = "another --out_dir for a new run"
    if not others.keys() & find_keys(RunKeys):
        ways += ", --init_from=resume to change this one"
    refuse(others, c, c.out_dir, ways)
    return c


def run_lines(new: Config, c: Config, before: Config, state: State) -> list[str]:
    """
    Say which checkpoint is resumed, which keys the run keeps that the command does not set, unless
    they are what the command would begin a `new` run with, and which keys have changed.
    """
    first = "" if c.init_from in NOT_WEIGHTS else f"; the run began from {c.init_from}"
    lines = [f"resume: {state.source}, iteration {state.iter_num:,}{first}"]
    if c.eval_only:
        return lines
    # the lines above and of the device show these two
    unset = [name for name in FIELDS if name not in {"init_from", "dtype", *c.set_keys}]
    kept = [n for n in unset if getattr(c, n) != getattr(new, n)]
    if kept:
        lines.append(f"resume: keeps {', '.join(f'{n} = {getattr(c, n)}' for n in kept)}")
    for name, x in config_values(c).items():
        if x != (was := getattr(before, name)):
            lines.append(f"resume: {name} = {x!r} (was {was!r})")
    return lines


def over_line(c: Config, state: State, key: str) -> str:
    """
    Say which `key` has ended a complete run, and how to resume it. Raises UserError if the command
    changes how it trains, because no iteration would train with that.
    """
    value, before = getattr(c, key), config_from(state.config)
    changed = [n for n in find_keys(TrainingKeys) if getattr(c, n) != getattr(before, n)]
    if changed:
        n = changed[0]
        problem = f"{n}: {c.out_dir} is complete, so nothing would train with {getattr(c, n)!r}"
        raise UserError(f"{problem}; give a larger --{key} too, or another --out_dir for a new run")
    whose = "" if key in c.set_keys else " of this run"
    done = f"{state.iter_num:,}"
    more = f"--max_iters={state.iter_num + 1} or more resumes it"
    if key == "hours":
        done = f"{done} of {c.max_iters:,}"
        more = "--hours=0 resumes it up to max_iters"
    complete = f"{c.out_dir}: complete after {done} iterations ({key} = {value:,}{whose})"
    return f"{complete}; {more}, another --out_dir begins a new run"


def length_problems(c: Config, before: Config, state: State) -> list[str]:
    """
    Return the problem if an unfinished run is asked for less than it has done, because it would end
    without decaying the learning rate.
    """
    if c.eval_only or state.complete:
        return []
    hours, it = training_hours(state.ledger), state.iter_num
    end = it + it // 10 + 1
    soon = f"--max_iters={end}" + (f" --lr_decay_iters={end}" if c.lr_decay_iters else "")
    lengths = [
        ("hours", hours, c.hours or math.inf, f"--hours={hours + 0.5:.1f}"),
        ("max_iters", it, c.max_iters, soon),
    ]
    return [
        f"{key}: {c.out_dir} has done {done:,.7g}, you asked for {asked:,}; give "
        f"--{key}={getattr(before, key)} as before or, to end soon with a decayed learning rate, "
        f"{enough}"
        for key, done, asked, enough in lengths
        if asked < done and getattr(c, key) != getattr(before, key)
    ]


def config_of_weights(c: Config) -> tuple[Config, State]:
    """
    Load the weights that init_from names, if it does. Returns the configuration with their sizes,
    and what the run begins with. Raises UserError.
    """
    if c.init_from in NOT_WEIGHTS:
        return c, State()
    from run.pretrained import load_pretrained  # only here, because few runs need it

    state = load_pretrained(c.init_from, c.block_size if "block_size" in c.set_keys else None)
    saved, of_model = state.model_config, {"model", *(f.name for f in fields(FastConfig))}
    theirs = {n: saved.get(n, f.default) for n, f in find_keys(RunKeys).items() if n in of_model}
    if saved["vocab_size"] % c.pad_vocab_multiple:  # loaded weights get no new rows
        theirs |= dict(pad_vocab_multiple=1)
    refuse(others_than(c, theirs), c, c.init_from, "another --init_from")
    return replace(c, **theirs), state


def others_than(c: Config, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the saved values of the keys that a file or flag sets to something else."""
    return {n: value for n, value in saved.items() if n in c.set_keys and getattr(c, n) != value}


def refuse(others: dict[str, Any], c: Config, source: str, ways: str) -> None:
    """
    Raise UserError if `source` has other values than the command: a line for each, and one with
    what to type. `ways` says what else the user may do.
    """
    if others:
        lines = [
            f"{n}: {source} has {x!r}, you asked for {getattr(c, n)!r}" for n, x in others.items()
        ]
        words = " ".join(f"--{name}={value}" for name, value in others.items())
        lines[-1] += f"{BELOW}give {ways}, or {words}"
        raise UserError(*lines)


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
