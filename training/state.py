"""
What a checkpoint holds, how it is saved, and how a run resumes from it.
"""

import inspect
from dataclasses import asdict, fields
from pathlib import Path

from torch import Tensor
from torch.utils._pytree import tree_map

from common.console import RunError, UserError
from configurator import Config, config_values, evaluated, saved_config
from data.shards import Dataset
from model import GPTConfig
from training import checkpoint
from training.build import build_shapes, check_optimizer, not_finite, optimizer_groups
from training.hardware import Hardware, get_rng_state, set_rng_state
from training.pretrained import check_state
from training.progress import Progress
from training.runlog import RunLog


def checkpoint_state(
    data: Dataset, model, optimizer, scaler, progress: Progress, log: RunLog
) -> dict:
    """Everything that resuming needs, between two iterations. All ranks take part."""
    return dict(
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        scaler=scaler.state_dict(),
        rng=log.ranks.gather(get_rng_state(log.hw.device)),
        progress=asdict(progress),
        ledger=dict(log.seconds),
        clock=log.clock.state_dict(),
        model_config=asdict(model.config),
        vocab=data.vocab,
        tokenizer=data.tokenizer,
        data_fingerprint=data.fingerprint,
        shards_read=data.stream.shards_read(progress.sequences) if data.stream else [],
        config=config_values(log.config),
        val_loss=progress.val_loss if progress.evaluated_at == progress.iter_num else None,
    )


def write_checkpoint(state: dict, log: RunLog) -> str:
    """
    Try once to save `state`. Returns an error line if the disk is full or fails, else "". To make
    room, older checkpoints are deleted before the write, the newest valid one only after it. Raises
    UserError for a state that must not be saved or could not be resumed.
    """
    it, best_iter = state["progress"]["iter_num"], state["progress"]["best_iter"]
    out_dir, keep = Path(log.config.out_dir), log.config.keep_checkpoints
    path, whole = checkpoint.checkpoint_path(out_dir, it), log.newest_checkpoint()
    if names := not_finite(state["model"], GPTConfig(**state["model_config"])):
        # if saved, they would soon replace the good checkpoints
        problem = f"iter {it}: {names[0]} is not finite, so the weights are not saved"
        raise RunError(f"{problem}; with a lower learning_rate, {log.way_back()}")
    if not (out_dir / "lock").exists():
        log.warn_once("gone", it, f"{out_dir} was deleted, with the log in it; making it again")
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        checkpoint.prune(out_dir, max(1, keep - 1), whole)
        size = checkpoint.save(state, path)
    except OSError as error:
        return f"checkpoint {it} is not saved: {error.strerror or error}"
    if not log.has_saved:  # check the first file now, not when you need it
        check_checkpoint(checkpoint.load(path), path)
    log.checkpoint(it, path, size)
    try:
        checkpoint.prune(out_dir, keep, path)
        if best_iter == it:
            checkpoint.mark_best(path)
    except OSError as error:
        log.warn(it, f"{path} is saved, but best.pt is unchanged: {error}")
    return ""


def check_checkpoint(state: dict, path: Path) -> None:
    """
    Raises UserError if an undamaged file cannot be resumed, because another version of this program
    or another program made it.
    """
    try:
        check_state(state, path)
        read_progress(state)
        check_optimizer_state(state)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: cannot be resumed by this version ({reason})") from None


def read_progress(state: dict) -> Progress:
    """The saved progress, without c336bd1's fields that are no longer used."""
    saved = state["progress"]
    return Progress(**{f.name: saved[f.name] for f in fields(Progress) if f.name in saved})


def check_optimizer_state(state: dict) -> None:
    """Raises ValueError unless a checkpoint's optimizer state is one of its model's parameters."""
    model, config = build_shapes(GPTConfig(**state["model_config"])), saved_config(state["config"])
    if problems := check_optimizer(config):
        raise ValueError(problems[0])
    groups = optimizer_groups(model, config)
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(group["params"]) for group in state["optimizer"]["param_groups"]]:
        raise ValueError("its optimizer groups the parameters differently")
    parameters = [p for group in groups for p in group["params"]]
    for number, kept in state["optimizer"]["state"].items():
        shape = parameters[number].shape
        for name, tensor in kept.items():
            # a tensor with as many dimensions as its parameter must have the same shape: a fused
            # update would write past a smaller one
            found = getattr(tensor, "shape", ())  # a plain number has none
            if len(found) == len(shape) and found != shape:
                raise ValueError(f"{name} of its {config.optimizer} is {[*found]}")


def as_saved(kept, before):
    """A value of an optimizer's state as it was saved, on the device where torch put it."""
    return before.to(kept.device, copy=True) if isinstance(before, Tensor) else kept


def restore(
    start: dict, model, optimizer, scaler, config: Config, hw: Hardware, rank: int
) -> Progress:
    """
    Load the weights, and on resume the rest of the checkpoint too, except hyperparameters, which
    are the config's. Returns how far the run is.
    """
    if start:
        model.load_state_dict(start["model"])
    if "progress" not in start:
        return Progress()
    groups, saved = optimizer.state_dict()["param_groups"], start["optimizer"]
    ours = {key for group in optimizer_groups(model, config) for key in group}
    for kind in type(optimizer).__mro__[:-1]:  # all but object
        ours |= inspect.signature(kind).parameters.keys()
    for group, before in zip(groups, saved["param_groups"], strict=True):
        # what the code does not set, such as the optimizer's own counters
        group |= {key: before[key] for key in before.keys() - ours}
    optimizer.load_state_dict(saved | dict(param_groups=groups))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, before in saved["state"].items():
        kept = optimizer.state[parameters[number]]
        # as saved: torch casts to the parameter's type, and on a CPU leaves them mapped to the file
        kept.update(tree_map(as_saved, {name: kept[name] for name in before}, before))
    if scaler.is_enabled() and start["scaler"]:
        scaler.load_state_dict(start["scaler"])
    if rank < len(start["rng"]):
        set_rng_state(start["rng"][rank], hw.device)
    progress = read_progress(start)
    if evaluated(saved_config(start["config"])) != evaluated(config):
        # another loss: the next evaluation is the best so far
        progress.best_val_loss = float("inf")
    return progress
