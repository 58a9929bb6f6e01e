"""
Where a run begins: from scratch, from its own newest checkpoint, or from weights trained elsewhere;
and on which data.
"""

import copy
import subprocess
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch

from common.console import UserError, did_you_mean, raise_if_any, say, warn
from configurator import INITIAL, NEVER, Config, config_values, resolve, saved_config, translate
from data.shards import Dataset, check_dataset, dataset_folder, is_made_on_demand, open_dataset
from model import HOW_COMPUTED, GPTConfig
from training.build import OPTIMIZERS, build_shapes, optimizer_groups
from training.checkpoint import holds_run, in_the_way, list_checkpoints, load_together
from training.clock import Clock
from training.hardware import check_device, get_rng_state, set_rng_state
from training.pretrained import check_state, load_pretrained
from training.progress import Progress
from training.ranks import Ranks
from training.runlog import RunLog

# vocab_size is no key: it follows from the dataset
ARCHITECTURE = [f.name for f in fields(GPTConfig) if f.name not in HOW_COMPUTED | {"vocab_size"}]
# A resumed run must keep these
FIXED_ON_RESUME = (*ARCHITECTURE, "pad_vocab_multiple", "optimizer", "seed", "stream")


@dataclass
class Start:
    """
    What init_from means. `resumed` is the checkpoint that a run resumes from. `weights` is that
    checkpoint, or weights trained elsewhere (then what load_pretrained() returns). Both are None
    from scratch.
    """

    resumed: dict | None = None
    weights: dict | None = None
    problems: list[str] = field(default_factory=list)


# -----------------------------------------------------------------------------
# Finding and checking


def find_start(config: Config, ranks: Ranks) -> Start:
    """Load what init_from names, which rank 0 checks for all. Notes what is wrong with it."""
    out_dir, resuming = Path(config.out_dir), config.init_from in ("resume", "auto")
    start = Start()
    if not resuming and ranks.from_main(holds_run, out_dir):
        if config.init_from == "scratch" or not config.eval_only:
            start.problems.append(in_the_way(out_dir))
    try:
        if resuming:
            start.resumed = start.weights = load_together(out_dir, check_checkpoint, ranks)
            if start.resumed:
                start.resumed["config"] = translate(start.resumed["config"])
        elif config.init_from != "scratch":
            block_size = config.block_size if "block_size" in config.given else None
            start.weights = ranks.from_main(load_pretrained, config.init_from, block_size)
    except UserError as error:
        start.problems += error.problems
        return start
    if start.weights or not resuming:
        return start
    # best.pt alone, or nanoGPT's checkpoint: weights, but no run of this program
    others = [out_dir / name for name in ("best.pt", "ckpt.pt")]
    if found := [path for path in others if ranks.from_main(Path.exists, path)]:
        hint = f"--init_from={found[0]} with another --out_dir starts from its weights"
        start.problems.append(f"init_from: {found[0]} cannot be resumed, only ckpt-*.pt; {hint}")
    elif config.init_from == "resume":
        runs = [path.name for path in out_dir.parent.glob("*") if list_checkpoints(path)]
        hint = f"--init_from=auto starts a new run there{did_you_mean(out_dir.name, runs)}"
        if out_dir.is_file():
            hint = f"it is a file; --out_dir={out_dir.parent} is its folder"
        start.problems.append(f"init_from: {out_dir} holds no checkpoint to resume; {hint}")
    elif ranks.is_main and (out_dir / "metrics.jsonl").exists():
        say(f"{out_dir}: an earlier start ended before its first save; this one begins anew")
    return start


def check_checkpoint(state: dict, path: Path) -> None:
    """
    Raises UserError where a whole file cannot be resumed: another version of this program, or
    another program, has made it.
    """
    try:
        check_state(state, path)
        Progress(**state["progress"])
        check_optimizer(state)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: cannot be resumed by this version ({reason})") from None


def check_optimizer(state: dict) -> None:
    """Raises ValueError unless a checkpoint's optimizer state is one of its model's parameters."""
    model, config = build_shapes(GPTConfig(**state["model_config"])), saved_config(state["config"])
    groups, moments = optimizer_groups(model, config), OPTIMIZERS[config.optimizer].moments
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(group["params"]) for group in state["optimizer"]["param_groups"]]:
        raise ValueError("its optimizer groups the parameters differently")
    expected = [dict.fromkeys(moments(g), tuple(p.shape)) for g in groups for p in g["params"]]
    for number, kept in state["optimizer"]["state"].items():
        found = {name: tuple(kept[name].shape) for name in expected[number] if name in kept}
        # a fused update would write past a smaller one
        if kept and found != expected[number]:
            table = "OPTIMIZERS in training/build.py says"
            raise ValueError(f"its {config.optimizer} keeps {found}; {table} {expected[number]}")


def check_start(config: Config, start: Start, ranks: Ranks) -> Config:
    """
    The configuration with the keys that the checkpoint or the weights decide. Raises a UserError
    with all that is wrong: with the configuration, the start, the device and the dataset.
    """
    config, problems = adopt(config, start)
    problems = start.problems + problems + check_device(config)
    problems += [] if config.stream else check_dataset(config)
    problems += resolve(config) + ranks.check_config(config)
    ranks.raise_together(problems)
    return config


def adopt(config: Config, start: Start) -> tuple[Config, list[str]]:
    """
    The configuration with the saved architecture and, on resume, the other keys that must stay.
    Also lists the keys that a file or flag has set to something else.
    """
    if not start.weights:
        return config, []
    if start.resumed:
        saved, names, source = start.resumed["config"], FIXED_ON_RESUME, config.out_dir
        kept = [n for n in ("dataset", "tokenizer") if n in saved and n not in config.given]
        config = replace(config, **{name: saved[name] for name in kept})
    else:
        saved, names, source = start.weights["model_config"], ARCHITECTURE, config.init_from
        if saved["vocab_size"] % config.pad_vocab_multiple:  # rows are never added to weights
            saved, names = saved | dict(pad_vocab_multiple=1), [*names, "pad_vocab_multiple"]
    # an older checkpoint lacks what came later
    values = {name: saved.get(name, getattr(Config, name)) for name in names}
    different = [
        f"{name} {value!r} (asked for: {getattr(config, name)!r})"
        for name, value in values.items()
        if name in config.given and getattr(config, name) != value
    ]
    other = "--out_dir and --init_from" if start.resumed else "--init_from"
    problem = f"init_from: {source} has {', '.join(different)}; use its values, or another {other}"
    return replace(config, **values), [problem] if different else []


def is_finished(config: Config, start: Start) -> bool:
    """Whether the resumed run has nothing left to do. Says so."""
    if not start.resumed or config.eval_only:
        return False
    progress = Progress(**start.resumed["progress"])
    changed, end = changed_keys(config, start), config.max_iters
    if config.by_clock and not {"hours", "until", "max_iters"}.intersection(changed):
        end = progress.iter_num if start.resumed.get("clock", {}).get("share", 0) >= 1 else NEVER
    if min(progress.iter_num, progress.evaluated_at) < end:
        return False
    key = "until" if config.until else "hours" if config.hours else "max_iters and --lr_decay_iters"
    done = f"all {progress.iter_num:,} iterations are done; to continue, give another --{key}"
    say(f"{config.out_dir}: {done}; for a new run, another --out_dir")
    return True


def changed_keys(config: Config, start: Start) -> dict:
    """
    The checkpoint's values of the keys whose values are others now. It has the defaults of those
    that came later.
    """
    values, saved = config_values(config), config_values(Config()) | start.resumed["config"]
    return {n: saved[n] for n in values if saved[n] != values[n] and n not in INITIAL}


def say_what_changed(config: Config, start: Start, ranks: Ranks, clock: Clock, get_lr) -> None:
    """
    Print how this start differs from the checkpoint's. `get_lr`: train.py's.
    """
    if not start.resumed:
        if start.weights:
            anew = "" if config.eval_only else "; iterations and learning rate begin anew"
            say(f"weights: {start.weights['source']}{anew}")
        elif config.eval_only and ranks.is_main:
            warn(f"eval_only: {config.out_dir} holds no checkpoint; this model is untrained")
        return
    progress = Progress(**start.resumed["progress"])
    path = Path(config.out_dir) / f"ckpt-{progress.iter_num:08}.pt"
    end = f"of {config.max_iters:,}"
    if config.by_clock:
        end = f"after {clock.used() / 3600:.2f} hours; by the clock, not bit for bit the same run"
    say(f"resume: {path}, iteration {progress.iter_num:,} {end}")
    changed = changed_keys(config, start)
    for name, before in changed.items():
        value = getattr(config, name)
        if NEVER not in (before, value):
            say(f"resume: {name} = {value!r} (the checkpoint had {before!r})")
    if unknown := start.resumed["config"].keys() - config_values(config).keys():
        say(f"resume: these are no longer keys and are ignored: {', '.join(sorted(unknown))}")
    horizon = progress.lr_horizon
    unmoved = horizon not in (config.max_iters, NEVER) and "lr_decay_iters" not in config.given
    decays = config.lr_schedule != "constant" and not config.eval_only
    if decays and unmoved and ranks.is_main:
        ends = f"the rate reaches min_lr = {config.min_lr:g} at iteration {horizon:,}, the old end"
        ends += "" if config.min_lr else ", and nothing is learnt after it"
        warn(f"{config.out_dir}: {ends}; --lr_decay_iters={config.max_iters} moves that")
    if config.until or {"hours", "max_iters"}.intersection(changed) and config.by_clock:
        say_new_rate(config, progress, ranks, clock, get_lr)


def say_new_rate(config: Config, p: Progress, ranks: Ranks, clock: Clock, get_lr) -> None:
    """By the clock: how another end moves the rate. All ranks take part."""
    it, highest = p.iter_num, config.learning_rate
    old = get_lr(it, config, clock.horizon(it, p.lr_horizon), highest)
    past_warmup = it > config.warmup_iters or clock.reading.share > 0.1
    decays = ", though its decay had begun" if past_warmup and old < highest else ""
    clock.look(it)
    new = get_lr(it, config, clock.horizon(it, NEVER), highest)
    if abs(new - old) > 0.01 * highest and ranks.is_main:
        warn(f"the learning rate continues at {new:.2e}, not at {old:.2e}{decays}")


# -----------------------------------------------------------------------------
# Data


def prepare_on_demand(config: Config) -> None:
    """Make the quickstart's dataset where it is missing: the one dataset that needs no download."""
    if not is_made_on_demand(config):
        return
    folder = dataset_folder(config.dataset)
    say(f"data: preparing {folder} from Python's own source files")
    script = Path(__file__).parent.parent / "data" / "prepare_text.py"
    command = [sys.executable, str(script), f"--out={folder}"]
    # hide its output, which ends with the next command to type
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"dataset: {script} failed; see its message above")
    raise_if_any(check_dataset(config))


def open_data(config: Config, start: Start, ranks: Ranks) -> Dataset:
    """
    The configured dataset: a folder, or a stream from where the checkpoint's left off, which
    rank 0 reads for all. Raises UserError where it is not the one that the checkpoint or the
    weights were trained on.
    """
    ranks.from_main(prepare_on_demand, config)
    if config.stream:
        from data.stream import open_stream

        from_main = ranks.make_stream_from_main()
        data = from_main(open_stream, config, start.resumed and start.resumed.get("stream"))
        data.stream.join_ranks(from_main, ranks.rank, ranks.world_size, config.batch_size)
    else:
        data = open_dataset(config.dataset)
    problems = []
    theirs = start.weights["tokenizer"] if start.weights else data.tokenizer
    if "unknown" not in (theirs["kind"], data.tokenizer["kind"]) and theirs != data.tokenizer:
        held = f"dataset: {data.source} has the tokenizer {data.tokenizer['kind']}"
        holder = config.out_dir if start.resumed else f"init_from={config.init_from}"
        known = f"the weights of {holder} another one, {theirs['kind']}"
        mend = "give data that has that one"
        if start.resumed:
            mend = "for a new run give another --out_dir"
        problems.append(f"{held}, {known}; {mend}")
    elif start.resumed and start.resumed["data_fingerprint"] != data.fingerprint:
        other = f"{data.source} is not what the checkpoint was trained on, or has changed since"
        problems.append(f"dataset: {other}; restore it, or start anew with another --out_dir")
    elif start.weights and start.weights["vocab"] < data.vocab:
        known = f"that of init_from={config.init_from} only {start.weights['vocab']}"
        problems.append(f"dataset: its vocabulary is {data.vocab}, {known}; choose another")
    ranks.raise_together(problems)
    ranks.check_same(dataset=data.fingerprint)
    return data


# -----------------------------------------------------------------------------
# What a checkpoint holds, and how a run resumes from it


def checkpoint_state(
    data: Dataset, model, optimizer, scaler, progress: Progress, log: RunLog
) -> dict:
    """Everything that resuming needs, as of the last whole iteration. All ranks take part."""
    return dict(
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        scaler=scaler.state_dict(),
        rng=log.ranks.gather(progress.rng),
        progress=progress.state_dict(),
        ledger=dict(log.ledger.seconds),
        clock=log.clock.state_dict(),
        model_config=asdict(model.config),
        vocab=data.vocab,
        tokenizer=data.tokenizer,
        data_fingerprint=data.fingerprint,
        stream=data.stream and data.stream.position(progress.sequences),
        config=config_values(log.config),
    )


def restore(
    config: Config, start: Start, model, optimizer, scaler, device: torch.device, rank: int
) -> Progress:
    """
    Load the weights. On resume take over the rest of the checkpoint too, except hyperparameters:
    those are the config's. Returns how far the run is.
    """
    horizon = config.lr_decay_iters or config.max_iters
    if start.weights:
        model.load_state_dict(start.weights["model"])
    if not start.resumed:
        return Progress(lr_horizon=horizon, rng=get_rng_state(device))
    state = start.resumed
    state["optimizer"]["param_groups"] = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(state["optimizer"])
    for kept in optimizer.state.values():  # on a CPU they would still be the file's pages
        kept.update(copy.deepcopy(kept))
    if scaler.is_enabled() and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    if rank < len(state["rng"]):
        set_rng_state(state["rng"][rank], device)
    progress = Progress(**state["progress"], rng=get_rng_state(device))
    if saved_config(state["config"]).eval_size != config.eval_size:
        # on other tokens: the next evaluation is the best so far
        progress.best_val_loss = progress.val_loss = float("inf")
    if "lr_decay_iters" in config.given or progress.lr_horizon == NEVER:
        progress.lr_horizon = horizon
    return progress
