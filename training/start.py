"""
Where a run begins: from scratch, from its own newest checkpoint, or from weights trained elsewhere;
and on which data.
"""

import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from common.console import UserError, did_you_mean, raise_if_any, say, warn
from configurator import Config, config_values, print_config, read_config, resolve, saved_config
from data.shards import Dataset, check_dataset, dataset_folder, is_made_on_demand, open_dataset
from model import GPTConfig
from training.build import build_model, build_optimizer
from training.checkpoint import Progress, holds_run, list_checkpoints, load_together
from training.hardware import Hardware, check_device, set_rng_state
from training.muon import no_mean_squares
from training.ranks import Ranks
from training.runlog import CATEGORIES

ARCHITECTURE = ("model", "n_layer", "n_head", "n_embd", "block_size", "bias", "tie_weights")
ARCHITECTURE += ("value_tables", "bigram_rows")
# A resumed run must keep these
FIXED_ON_RESUME = (*ARCHITECTURE, "pad_vocab_multiple", "optimizer", "seed", "stream")
# With another value of these, sums are rounded differently
ROUNDING = (
    *("device", "dtype", "compile", "flash", "loss_chunk", "recompute", "tf32"),
    *("batch_size", "gradient_accumulation_steps"),
)
MOST_SEQUENCES = 2**20  # of one iteration: to find a place far beyond them would take for ever
# What an optimizer may keep for a parameter
ADAM_STATES = ({"step", "exp_avg", "exp_avg_sq"},)
MUON_STATES = ({"momentum", "mean_squares"}, {"momentum"})  # the latter: before NorMuon


@dataclass
class Start:
    """
    What init_from means. `resumed` is the checkpoint a run goes on from. `weights` is that
    checkpoint, or weights trained elsewhere (then only `model`, `model_config` and `vocab`). Both
    are None from scratch.
    """

    resumed: dict | None = None
    weights: dict | None = None
    known: list[Path] = field(default_factory=list)  # checkpoints in out_dir at that time
    problems: list[str] = field(default_factory=list)


# -----------------------------------------------------------------------------
# Finding and checking


def read_arguments(argv: list[str], ranks: Ranks) -> Config:
    """The configuration of files and flags. Raises UserError, also where ranks differ."""
    config, problems = read_config(argv)
    ranks.raise_together(problems)
    ranks.check_same("configuration", print_config(config))
    return config


def find_start(config: Config, ranks: Ranks) -> Start:
    """Load what init_from names, which rank 0 checks for all. Notes what is wrong with it."""
    out_dir, resuming = Path(config.out_dir), config.init_from in ("resume", "auto")
    start = Start(known=list_checkpoints(out_dir))
    if not (resuming or config.overwrite) and ranks.from_first(holds_run, out_dir):
        if not config.eval_only:
            ways = "--init_from=auto goes on; or another --out_dir=; or --overwrite=True deletes it"
            start.problems.append(f"out_dir: {out_dir} holds an earlier run; {ways}")
        elif config.init_from == "scratch":
            problem = "scratch would evaluate random weights, not those of the run in"
            start.problems.append(f"init_from: {problem} {out_dir}; --init_from=resume")
    try:
        if resuming:
            start.resumed = start.weights = load_together(out_dir, validate, ranks)
        elif config.init_from != "scratch":
            start.weights = ranks.from_first(read_pretrained, config)
    except UserError as error:
        start.problems += error.problems
        return start
    if not start.weights and config.init_from == "resume":
        runs = [str(path) for path in out_dir.parent.glob("*") if list_checkpoints(path)]
        hint = f"--init_from=auto starts where there is none{did_you_mean(str(out_dir), runs)}"
        start.problems.append(f"init_from: {out_dir} holds no checkpoint to resume; {hint}")
    if not start.weights and config.init_from == "auto":
        if ranks.from_first(Path.exists, out_dir / "best.pt"):
            hint = f"--init_from={out_dir}/best.pt with another --out_dir starts from its weights"
            start.problems.append(f"init_from: {out_dir} holds best.pt but no ckpt-*.pt; {hint}")
    return start


def validate(state: dict, path: Path) -> None:
    """
    Raises UserError where a file with the right checksum holds something other than a run that can
    go on: made by another version, or by a stranger.
    """
    from training.pretrained import check_state

    try:
        check_values(state["progress"], asdict(Progress()))
        check_values(state["ledger"], dict.fromkeys(CATEGORIES, 0.0))
        if state["scaler"]:  # empty unless in float16
            check_values(state["scaler"], torch.amp.GradScaler("cpu").state_dict())
        saved, p = state["config"], Progress(**state["progress"])
        config = saved_config(saved)
        model = GPTConfig(**state["model_config"])
        right = dict(
            config=all(type(v) is type(saved.get(n, v)) for n, v in vars(config).items()),
            model_config=all(getattr(config, n) == getattr(model, n) for n in ARCHITECTURE),
            sequences=p.iter_num <= p.sequences <= MOST_SEQUENCES * p.iter_num,
            tokens=p.tokens == p.sequences * config.block_size,
            stream=not state.get("stream") or state["stream"]["sequence"] == p.sequences,
            data=type(saved["dataset"]) is type(state["data_fingerprint"]) is str,
            data_modified=type(state.get("data_modified", 0.0)) is float,
            model=all(weights.isfinite().all() for weights in state["model"].values()),
        )
        if wrong := [name for name, is_right in right.items() if not is_right]:
            raise ValueError(", ".join(wrong))
        _, state["tokenizer"] = check_state(state, path)
        for states in state["rng"]:
            torch.Generator().set_state(states["cpu"])
        if p.iter_num or state["optimizer"]["state"]:  # the first update makes it
            check_optimizer(state["optimizer"]["state"], config, model)
    except Exception as error:  # a stranger's file may hold anything
        origin = "made by another version of this program or changed"
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: cannot be resumed, {origin} ({reason})") from None


def check_values(found: dict, fresh: dict) -> None:
    """
    Raise an exception unless the names and types are those of a fresh run's values, and each value
    is from 0 to 2^53 or a fresh run's, such as an infinite best loss.
    """
    for name in found.keys() | fresh.keys():
        value, first = found[name], fresh[name]
        if type(value) is not type(first) or not (0 <= value < 2**53 or value == first):
            raise ValueError(f"{name} {value!r:.60}")


def check_optimizer(states: dict, config: Config, model_config: GPTConfig) -> None:
    """Raise an exception unless this is the state of all the model's parameters."""
    with torch.device("meta"):  # shapes without memory
        groups = build_optimizer(build_model(model_config), config, torch.float32).param_groups
    parameters = dict(enumerate((p, group) for group in groups for p in group["params"]))
    for number in states.keys() | parameters.keys():
        p, group = parameters[number]
        if states[number].keys() not in (MUON_STATES if "momentum" in group else ADAM_STATES):
            raise ValueError(f"optimizer states {sorted(states[number])}")
        for name, moment in states[number].items():
            shape = () if name == "step" else p.shape
            if name == "mean_squares":
                shape = no_mean_squares(p, group["parts"]).shape
            # fused AdamW would write past a tensor of another size or layout
            fits = (moment.shape, moment.dtype) == (shape, torch.float32) and moment.is_contiguous()
            positive = name in ("exp_avg", "momentum") or (moment >= 0).all()
            if not (fits and positive and moment.isfinite().all()):
                raise ValueError(f"optimizer state {name}")


def read_pretrained(config: Config) -> dict:
    from training.pretrained import load_pretrained  # rarely needed, and it needs safetensors

    block_size = config.block_size if "block_size" in config.given else None
    return load_pretrained(config.init_from, block_size)


def check_start(config: Config, start: Start, ranks: Ranks) -> Config:
    """
    The configuration with the keys that the checkpoint or the weights decide. Raises a UserError
    with all that is wrong: with the configuration, the start, the device and the dataset.
    """
    config, problems = adopt(config, start)
    problems = start.problems + problems + check_device(config)
    # only the first rank reads a stream
    problems += ranks.from_first(check_data, config) if config.stream else check_data(config)
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
    saved = config_values(Config()) | saved  # an older checkpoint lacks what came later
    values = {name: saved[name] for name in names}
    different = [
        f"{name} {value!r} (asked for: {getattr(config, name)!r})"
        for name, value in values.items()
        if name in config.given and getattr(config, name) != value
    ]
    problems = []
    if different and start.resumed:
        holds = f"holds a run with {', '.join(different)}; use its values, or another --out_dir="
        delete = "--init_from=scratch --overwrite=True deletes it"
        problems.append(f"out_dir: {source} {holds}, or {delete}")
    elif different:
        problems.append(f"init_from: {source} has {', '.join(different)}; use its values")
    return replace(config, **values), problems


def is_finished(config: Config, start: Start) -> bool:
    """Whether the resumed run has nothing left to do. Says so."""
    if not start.resumed or config.eval_only:
        return False
    progress = Progress(**start.resumed["progress"])
    if min(progress.iter_num, progress.evaluated_at) < config.max_iters:
        return False
    asked = [f"{name} = {getattr(config, name)!r}" for name in changed_keys(config, start)]
    another = f"; for a new run with {', '.join(asked)}: another --out_dir" if asked else ""
    done = f"has made its {progress.iter_num:,} iterations"
    say(f"{config.out_dir} {done}; a larger --max_iters goes on{another}")
    return True


def changed_keys(config: Config, start: Start) -> list[str]:
    """Those whose values are not the checkpoint's."""
    values, saved = config_values(config), start.resumed["config"]
    return [n for n in values if n in saved and saved[n] != values[n] and n != "init_from"]


def say_what_changed(config: Config, start: Start, ranks: Ranks) -> None:
    """Print how this start differs from the checkpoint's, and whether the run stays bit for bit."""
    if not start.resumed:
        return
    progress = Progress(**start.resumed["progress"])
    path = Path(config.out_dir) / f"ckpt-{progress.iter_num:08}.pt"
    say(f"resume: {path}, iteration {progress.iter_num:,} of {config.max_iters:,}")
    changed = changed_keys(config, start)
    for name in changed:
        before = start.resumed["config"][name]
        say(f"resume: {name} = {getattr(config, name)!r} (the checkpoint had {before!r})")
    horizon = progress.lr_horizon
    unmoved = horizon != config.max_iters and "lr_decay_iters" not in config.given
    if config.decay_lr and unmoved and ranks.first:
        ends = "still ends there"
        if horizon <= progress.iter_num:
            ends = f"ended there: this goes on at {config.min_lr:g}"
        warn(
            f"{config.out_dir} began as a run of {horizon:,} iterations, and the rate's decay "
            f"{ends}; --lr_decay_iters={config.max_iters} moves that; for a new run: "
            "another --out_dir"
        )
    rounding = [name for name in changed if name in ROUNDING]
    if len(start.resumed["rng"]) != ranks.world_size:
        rounding.append("number of processes")
    if rounding:
        what = ", ".join(rounding)
        say(f"resume: with another {what} sums round differently: not bit for bit the same run")


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


def check_data(config: Config) -> list[str]:
    """What is wrong with the dataset, or with the source of a stream, one line per problem."""
    if not config.stream:
        return check_dataset(config)
    from data.stream import check_source  # training from shards does not need it

    return check_source(config)


def open_data(config: Config, start: Start, ranks: Ranks) -> Dataset:
    """
    The configured dataset: a folder, or a stream from where the checkpoint's left off, which the
    first rank reads for all. Raises UserError where it is not the one that the checkpoint or the
    weights were trained on.
    """
    ranks.from_first(prepare_on_demand, config)
    if config.stream:
        from data.stream import open_stream

        from_first = ranks.make_stream_from_first()
        data = from_first(open_stream, config, start.resumed and start.resumed.get("stream"))
        data.stream.share(from_first, ranks.rank, ranks.world_size, config.batch_size)
    else:
        data = open_dataset(config.dataset)
    problems = []
    theirs = start.weights["tokenizer"] if start.weights else data.tokenizer
    if "unknown" not in (theirs["kind"], data.tokenizer["kind"]) and theirs != data.tokenizer:
        held = f"dataset: {data.source} has the tokenizer {data.tokenizer['kind']}"
        known = f"the weights of init_from={config.init_from} another one, {theirs['kind']}"
        name = "PATH, their tokenizer.json" if theirs["kind"] == "bpe" else theirs["kind"]
        mend = "start" if config.stream else "prepare the text again"
        problems.append(f"{held}, {known}; {mend} with --tokenizer={name}")
    elif start.resumed and start.resumed["data_fingerprint"] != data.fingerprint:
        other = f"{data.source} is not what the checkpoint was trained on, or has changed since"
        problems.append(f"dataset: {other}; restore it, or start anew with another --out_dir")
    elif start.weights and start.weights["vocab"] < data.vocab:
        known = f"that of init_from={config.init_from} only {start.weights['vocab']}"
        problems.append(f"dataset: its vocabulary is {data.vocab}, {known}; choose another")
    ranks.raise_together(problems)
    ranks.check_same("dataset", data.fingerprint)
    if start.resumed and start.resumed.get("data_modified", data.modified) != data.modified:
        # the fingerprint covers only the ends of each file
        warn(f"dataset: files of {data.source} were written after the checkpoint's run began")
    return data


# -----------------------------------------------------------------------------
# Restoring


def restore(
    config: Config, start: Start, model, optimizer, scaler, hw: Hardware, rank: int
) -> Progress:
    """
    Load the weights. On resume take over the rest of the checkpoint too, except hyperparameters:
    those are the config's. Returns how far the run is.
    """
    horizon = config.lr_decay_iters or config.max_iters
    if start.weights:
        model.load_state_dict(start.weights["model"])
    if not start.resumed:
        return Progress(lr_horizon=horizon)
    state = start.resumed
    state["optimizer"]["param_groups"] = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(state["optimizer"])
    for moments in optimizer.state.values():  # on a CPU they would still be the file's pages
        moments.update({name: moment.clone() for name, moment in moments.items()})
    if scaler.is_enabled() and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    if rank < len(state["rng"]):
        set_rng_state(state["rng"][rank], hw.device)
    progress = Progress(**state["progress"])
    if "lr_decay_iters" in config.given:
        progress.lr_horizon = horizon
    return progress
