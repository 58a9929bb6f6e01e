"""
Define every configuration key, its default and its meaning, and read config files and flags.

    python train.py config/gpt124m_4070.py --batch_size=4    files from left to right, then flags
    python train.py --help                                   every key: type, default, meaning
    python configurator.py config/x.py --batch_size=4        print the result as a config file

A flag wins over a file, wherever it stands, and a later file over an earlier one. A config file is
Python and runs with the values so far, and all flags, as its variables, so `lr_decay_iters =
max_iters` works. Keys that nanoGPT also has keep its names, and its defaults except for device,
dtype, batch_size and lr_decay_iters.

A resumed run keeps its own value of each key that the command's files and flags do not set, and the
files see that value. The class that lists a key says what happens if the command sets it to another
value.

sample.py lists its own keys in a dataclass like Config, and reads them with the functions below.
"""

import ast
import builtins
import contextlib
import inspect
import math
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from common.console import UserError, did_you_mean, one_line, raise_if_any, run_main
from common.files import read_text
from common.process import world_size

SAVE_EVERY = 600  # seconds between saves if checkpoint_interval is 0
NANOGPT_BATCH = 12  # nanoGPT's batch_size, where none is set and it is not known how many fit
TRAIN_EVAL_TOKENS = 2**20  # the most that an evaluation reads of the training split
NOT_WEIGHTS = ("scratch", "resume")  # what init_from may be, besides weights
# What a key of each type needs, in words and as a test
PLAIN: dict[type, Any] = {
    bool: Annotated[bool, "True or False", lambda x: True],
    int: Annotated[int, "a whole number, 0 or more", lambda x: 0 <= x < 2**63],  # torch's limit
    float: Annotated[float, "a finite number, 0 or more", lambda x: 0 <= x < math.inf],
    str: Annotated[str, "text", lambda x: True],
}
Positive = Annotated[int, "a whole number, 1 or more", lambda x: 1 <= x < 2**63]
BelowOne = Annotated[float, "a number from 0 to below 1", lambda x: 0 <= x < 1]
UpToOne = Annotated[float, "a number from 0 to 1", lambda x: 0 <= x <= 1]
Location = Annotated[str, "a path or a name", bool]  # not "", which a shell makes of an unset $DIR
Tracker = Literal["none", "wandb", "tensorboard"]
Model = Literal["gpt2", "fast"]
Optimizer = Literal["adamw", "muon"]
Schedule = Literal["cosine", "wsd"]
Dtype = Literal["float32", "bfloat16", "float16", "auto"]


@dataclass(frozen=True)
class RunKeys:
    """
    What a run is. A command that resumes it with another value is refused: begin a new run in
    another out_dir. Only init_from may always be scratch or resume, which name no weights.
    """

    # Start
    init_from: Location = "scratch"  # new run: scratch, gpt2, OWNER/NAME, path; resume: no new run
    seed: int = 1337  # for initial weights, dropout and data order
    # Model
    model: Model = "gpt2"  # GPT-2, or a newer model that needs fewer tokens for the same loss
    n_layer: Positive = 12  # transformer blocks
    n_head: Positive = 12  # attention heads; must divide n_embd
    n_embd: Positive = 768  # channels of the residual stream (width)
    block_size: Positive = 1024  # tokens in a sequence (context length)
    bias: bool = False  # biases in linear layers and norms, as in GPT-2; model=fast: gains too
    tie_weights: bool = True  # share token embedding and output head; model=fast sets False
    pad_vocab_multiple: Positive = 128  # round the vocabulary size up to a multiple; 1: off
    optimizer: Optimizer = "adamw"  # AdamW, or Muon for hidden matrices
    # Batch
    tokens_per_iter: int = 0  # 0: gradient_accumulation_steps (40) x batch_size (12) x block_size


@dataclass(frozen=True)
class TrainingKeys:
    """
    How it trains. Another value is refused too, unless the command has --init_from=resume (for a
    complete run, with more to do) or --eval_only, which trains nothing. dtype=auto and eval_iters
    keep what the run has.
    """

    # Optimizer
    learning_rate: float = 6e-4  # peak rate; with Muon: attention's (see config/fast.py)
    muon_momentum: BelowOne = 0.96  # momentum of Muon's updates, which rises from 0.85 to this
    weight_decay: float = 0.1  # for matrices; with Muon: for embeddings and head
    beta1: BelowOne = 0.9  # AdamW's decay rate for the running mean of gradients
    beta2: BelowOne = 0.95  # AdamW's decay rate for the mean of squared gradients; not Muon's
    grad_clip: float = 1.0  # clip the gradient norm to this value; 0: off
    dropout: BelowOne = 0.0  # dropout probability; 0.1 or more for fine-tuning and small texts
    dtype: Dtype = "auto"  # dtype of the matmuls; auto: the fastest here
    # Schedule
    lr_schedule: Schedule = "cosine"  # how the learning rate decays; wsd: constant, then linear
    decay_fraction: UpToOne = 0.2  # with wsd: fraction of the run spent decaying; 0: constant rate
    min_lr: float = 6e-5  # final rate (with Muon >= peak / 5); if unset above the peak: peak / 10
    # Evaluation
    eval_tokens: Positive = 2457600  # val tokens per evaluation; of train as many, up to 2**20


@dataclass(frozen=True)
class LaunchKeys:
    """
    How far, where and on what. A resumed run takes another value. But its dataset must hold the
    same tokens, and max_iters and hours must be at least what an unfinished run has done.
    """

    # Length
    max_iters: int = 600000  # iterations to train
    hours: float = 0.0  # train for this many hours at most, and fit the schedule to them; 0: off
    warmup_iters: int = 2000  # iterations of linear warmup
    lr_decay_iters: int = 0  # iteration at which the decay ends; 0: max_iters
    # Data
    dataset: Location = "openwebtext"  # a folder in data/, or a path
    batch_size: int = 0  # sequences in a micro-batch; 0: as many as fit a GPU, or 12 elsewhere
    # I/O
    out_dir: Location = "out"  # folder of the run: checkpoints, metrics.jsonl, loss.png
    eval_interval: Positive = 2000  # iterations between evaluations
    eval_only: bool = False  # evaluate out_dir's run or init_from's weights once; write nothing
    sample_tokens: int = 0  # print a sample of this many tokens after each evaluation; 0: none
    checkpoint_interval: int = 0  # iterations between checkpoints; 0: every ten minutes
    keep_checkpoints: Positive = 2  # newest checkpoints to keep, besides the best
    log_interval: Positive = 1  # iterations between log lines
    tracker: Tracker = "none"  # a dashboard to report to, in addition to metrics.jsonl
    wandb_project: str = "owt"  # project in wandb; a run's name there is that of its out_dir
    # System
    device: str = "auto"  # auto, cuda, cuda:1, mps or cpu
    compile: bool = True  # use torch.compile, after comparing its results with plain code's
    flash: bool = True  # use PyTorch's fused attention; False needs much more memory
    loss_chunk: str = "auto"  # tokens per chunk of the loss: a number, auto, or off
    tf32: bool = True  # TF32 tensor cores for float32 matmuls on CUDA
    deterministic: bool = False  # bit-identical runs on CUDA, somewhat slower
    peak_tflops: float = 0.0  # dense peak of your GPU, for MFU; 0: look it up, or measure it


@dataclass(frozen=True)
class Config(LaunchKeys, TrainingKeys, RunKeys):  # the last base has the first keys
    """
    Train a GPT. Ctrl-C saves and stops the run; the same command resumes it.

        python train.py config/gpt124m_4070.py --batch_size=4
        python train.py config/quickstart.py --max_iters=100 --out_dir=out/short

    A resumed run keeps its own value of each key that the command's files and flags do not set.
    """

    # Not a key: the names of the keys that a file or a flag set
    set_keys: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def iter_sequences(self) -> int:
        """Return the sequences per iteration, across all ranks."""
        return self.tokens_per_iter // self.block_size

    def tokens_between(self, first: int, last: int) -> int:
        """
        Return the tokens of iterations `first` to last - 1, from which the batch of each iteration
        and all totals follow. Change the batch size during a run here.
        """
        return (last - first) * self.tokens_per_iter


@dataclass
class NanoGPTKeys:
    """Lists nanoGPT's keys that are no keys here. from_nanogpt() translates or ignores them."""

    backend: str = "nccl"  # ignored, because the device determines it
    always_save_checkpoint: bool = True  # ignored: the best is kept beside the newest checkpoints
    wandb_log: bool = False  # tracker=wandb; False: tracker=none
    wandb_run_name: str = "gpt2"  # ignored: in wandb a run has the name of its out_dir
    decay_lr: bool = True  # lr_schedule=cosine; False: a constant rate without warmup
    gradient_accumulation_steps: Positive = 40  # tokens_per_iter of so many micro-batches
    eval_iters: Positive = 200  # eval_tokens of so many micro-batches


def find_keys(keys: type) -> dict[str, Field]:
    """Return the keys that a dataclass lists, by name."""
    return {f.name: f for f in fields(keys) if f.compare}


FIELDS = find_keys(Config)
NANOGPT_FIELDS = find_keys(NanoGPTKeys)
# nanoGPT counts the first of each pair in micro-batches, we count the second in tokens
OTHER_NAME = dict(gradient_accumulation_steps="tokens_per_iter", eval_iters="eval_tokens")
OTHER_NAME |= {ours: theirs for theirs, ours in OTHER_NAME.items()}

HELP_COLUMN = 44  # column at which --help explains a flag

# -----------------------------------------------------------------------------
# Files and flags


def load_config(argv: list[str]) -> Config:
    """
    Read a command line into a Config and fill in the values that follow from other keys. Raises
    UserError with one line per problem.
    """
    config = resolve(read_config(argv))
    raise_if_any(problems_of(config, world_size()))
    return config


def read_config(argv: list[str], keys: type = Config, kept: dict[str, Any] | None = None) -> Any:
    """
    Read config files from left to right, then --key=value flags, into an instance of the dataclass
    `keys`. The values `kept` by a run take the place of defaults. The Config of a new run must
    still go through resolve(). Raises UserError with one line per problem.
    """
    kept = kept or {}
    if "--help" in argv or "-h" in argv:
        print_help(keys)
        sys.exit(0)
    known = find_keys(keys) | (NANOGPT_FIELDS if keys is Config else {})
    problems: list[str] = []
    values: dict[str, Any] = {}  # what the files set
    typed: dict[str, Any] = {}  # what the flags set; read first, because files see them
    flags = [argument for argument in argv if argument.startswith("-") or "=" in argument]
    for argument in [*flags, *(argument for argument in argv if argument not in flags)]:
        try:
            if argument in flags:
                typed |= read_flag(argument, known)
            else:
                found = read_file(Path(argument), known, kept | values | from_nanogpt(typed))
                values = last_wins(values, from_nanogpt(found))
        except UserError as error:
            problems += error.args
    raise_if_any(problems)
    given = values.get("tokens_per_iter")
    values = last_wins(values, from_nanogpt(typed))
    # Multiply only now, because nanoGPT counts micro-batches of the size that holds in the end
    now = kept | values
    block_size = now.get("block_size", Config.block_size)
    micro_batch = (now.get("batch_size") or NANOGPT_BATCH) * block_size
    steps, tokens = (values.pop(n, 0) for n in ("gradient_accumulation_steps", "tokens_per_iter"))
    if steps and not tokens:
        tokens = steps * micro_batch
        if given and given != tokens:  # flags cannot mean other tokens than the files
            raise UserError(
                f"gradient_accumulation_steps: with {steps}, an iteration has {tokens:,} tokens, "
                f"but the config has tokens_per_iter = {given}; instead give --batch_size="
                f"{max(1, given // (steps * block_size))}, or --tokens_per_iter={tokens}"
            )
    if tokens:
        values["tokens_per_iter"] = tokens
    set_keys = frozenset(values)  # without an eval_tokens from eval_iters, which a resume keeps
    values = kept | values
    if iters := values.pop("eval_iters", 0):
        values.setdefault("eval_tokens", iters * micro_batch)
    return keys(**values, set_keys=set_keys)


def last_wins(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the values before, replaced by those found in a later file or in the flags."""
    replaced = [OTHER_NAME.get(name) for name in found]
    return {name: value for name, value in before.items() if name not in replaced} | found


def from_nanogpt(found: dict[str, Any]) -> dict[str, Any]:
    """
    Translate nanoGPT's key names into ours, but for those that need the micro-batch. `found` holds
    what a file or the flags set. If it sets both names, ours wins.
    """
    keys = {n: v for n, v in found.items() if n not in NANOGPT_FIELDS or n in OTHER_NAME}
    if "wandb_log" in found:
        keys.setdefault("tracker", "wandb" if found["wandb_log"] else "none")
    if "decay_lr" in found:
        keys.setdefault("lr_schedule", "cosine" if found["decay_lr"] else "wsd")
        if not found["decay_lr"]:  # nanoGPT then skips warmup too
            keys = dict(decay_fraction=0.0) | keys | dict(warmup_iters=0, lr_decay_iters=0)
    return keys


def read_flag(argument: str, known: dict[str, Field]) -> dict[str, Any]:
    """Parse one flag into {key: value}. Raises UserError."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--") or not equals:
        raise UserError(f"{argument}: flags are written --key=value")
    if name not in known:
        raise UserError(f"--{name}: unknown key{did_you_mean(name, known, '--')}")
    value = parse_value(text, key_type(known[name])[0])
    return {name: check_value(value, known[name], f"--{name}")}


def read_file(path: Path, known: dict[str, Field], values: dict[str, Any]) -> dict[str, Any]:
    """
    Run a config file with these `values` as its variables. Returns the keys that it sets, in
    order, and skips keys of train.py that are not `known` to this script. Raises UserError.
    """
    if not path.is_file():
        there = ", ".join(sorted(map(str, Path("config").glob("*.py"))))
        raise UserError(f"{path}: no such config file; there are {there or 'none in config/'}")
    defaults = {name: f.default for name, f in (NANOGPT_FIELDS | FIELDS | known).items()}
    values = values | dict(batch_size=values.get("batch_size") or NANOGPT_BATCH)  # to compute with
    # Pass the values as builtins, so that `variables` will hold only what the file sets.
    variables: dict[str, Any] = {"__builtins__": vars(builtins) | defaults | values}
    variables |= {"__file__": str(path), "__name__": "__main__"}
    try:
        tree = ast.parse(read_text(path, errors="strict"), str(path))
        exec(compile(tree, str(path), "exec"), variables)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        # A SyntaxError has no frame in the file, which never ran.
        line = lines[-1] if lines else getattr(error, "lineno", None) or 1
        raise UserError(f"{path}:{line}: {one_line(error)}") from None
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and type(n.ctx) is ast.Load}
    found = {}
    problems = []
    for name, value in variables.items():
        is_code = callable(value) or inspect.ismodule(value)  # functions, classes, imports
        if name in known:
            try:
                found[name] = check_value(value, known[name], name)
            except UserError as error:
                problems.append(f"{path}: {error}")
        elif not (is_code or name in defaults or name in used or name.startswith("_")):
            meant = did_you_mean(name, known)
            hint = "start names of your own with _"
            problems.append(f"{path}: {name}: unknown key{meant or f'; {hint}'}")
    raise_if_any(problems)
    return found


def key_type(f: Field) -> tuple[Any, str, Callable[[Any], bool], tuple[str, ...]]:
    """Return a key's Python type, what a value needs (in words, as a test), and any choices."""
    if get_origin(f.type) is Annotated:
        return *get_args(f.type), ()
    return *get_args(PLAIN[type(f.default)]), get_args(f.type)


def parse_value(text: str, kind: type) -> Any:
    """Parse a flag's text as a Python value; text that is not one stays text."""
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text)  # as in nanoGPT, for --start='"\n"'
        if isinstance(value, str) or kind is not str:
            return value
    return text


def check_value(value: Any, f: Field, where: str) -> Any:
    """
    Convert a value to the key's type. Accepts whole floats for ints, ints for floats, and 0 and 1
    for booleans. `where` names the key in messages. Raises UserError if the value does not fit.
    """
    kind, needed, is_right, choices = key_type(f)
    if kind is not str and not isinstance(value, bool):
        with contextlib.suppress(ArithmeticError, TypeError, ValueError):
            if kind(value) == value:
                value = kind(value)
    # a default need not pass the test: a Location that is not set may be ""
    if type(value) is not kind or not (value == f.default or is_right(value)):
        raise UserError(f"{where}: needs {needed}, got {value!r:.60}")
    if choices and value not in choices:
        raise UserError(
            f"{where}: {value!r} is not one of {', '.join(choices)}{did_you_mean(value, choices)}"
        )
    # neither Python nor, in --key=~/x, a shell expands a ~
    return os.path.expanduser(value) if f.type is Location else value


# -----------------------------------------------------------------------------
# What follows from the keys


def resolve(c: Config) -> Config:
    """Return the configuration of a new run, with the values that follow from other keys."""
    if c.model == "fast" and "tie_weights" not in c.set_keys:
        c = replace(c, tie_weights=False)
    # Keep an unset min_lr below the peak, so that the learning rate does not rise towards it.
    if c.learning_rate < c.min_lr and "min_lr" not in c.set_keys:
        c = replace(c, min_lr=c.learning_rate / 10)
    if not c.tokens_per_iter:
        micro_batch = (c.batch_size or NANOGPT_BATCH) * c.block_size
        c = replace(c, tokens_per_iter=NanoGPTKeys.gradient_accumulation_steps * micro_batch)
    return c


def problems_of(c: Config, processes: int) -> list[str]:
    """Return a line for each combination of values that cannot work."""
    problems = []
    unit = c.block_size * processes
    if c.tokens_per_iter % unit:
        among = f"among {processes} processes (WORLD_SIZE) with block_size {c.block_size}"
        problem = f"tokens_per_iter: {c.tokens_per_iter} cannot be shared equally {among}"
        nearest = max(1, round(c.tokens_per_iter / unit)) * unit
        problems.append(f"{problem}; use {nearest} in a new run, or other processes")
    head_size, rest = divmod(c.n_embd, c.n_head)
    if rest:
        problems.append(f"n_head: {c.n_head} must divide n_embd {c.n_embd}")
    if not re.fullmatch(r"auto|off|[1-9][0-9]{0,8}", c.loss_chunk):
        problems.append(f"loss_chunk: {c.loss_chunk!r} is not auto, off or a number like 1024")
    if c.model == "fast":
        if not rest and head_size % 4:
            problem = f"n_head: the heads have {head_size} channels each"
            problems.append(f"{problem}, but model=fast needs a multiple of 4")
        if c.tie_weights:
            problems.append("tie_weights: model=fast has its own head; set --tie_weights=False")
    return problems


# -----------------------------------------------------------------------------
# Printing


def config_values(config: Config) -> dict[str, Any]:
    """Return the keys and their values as checkpoints and metrics.jsonl store them."""
    return {name: getattr(config, name) for name in FIELDS}


def config_from(values: dict[str, Any]) -> Config:
    """Return the configuration in stored values. Keys that they lack get their defaults."""
    return Config(**{name: value for name, value in values.items() if name in FIELDS})


def config_text(config: Config) -> str:
    """Return the text of a config file that sets this configuration."""
    return "".join(f"{name} = {value!r}\n" for name, value in config_values(config).items())


def print_help(keys: type = Config) -> None:
    """Print the keys as flags, with the headings and comments of their dataclass and its bases."""
    script = os.path.basename(sys.argv[0])
    print(f"usage: python {script} [config.py ...] [--key=value ...]   (flags win over files)\n")
    print(inspect.cleandoc(keys.__doc__ or ""))
    known = find_keys(keys)
    for part in reversed(keys.__mro__[:-1]):
        if part is not keys:
            print(f"\n{inspect.getdoc(part)}")
        for line in inspect.getsource(part).splitlines():
            if title := re.fullmatch(r"    # (\w[\w/ ]*)", line):
                print(f"\n{title[1]}:")
            elif (key := re.match(r"    (\w+): .* = (.+?)  # (.+)", line)) and key[1] in known:
                name, meaning = key[1], key[3]
                default = key[2].strip('"').removesuffix(".0") or '""'
                kind, *_, choices = key_type(known[name])
                flag = f"  --{name}={'|'.join(choices) or kind.__name__}"
                text = f"{flag:<{HELP_COLUMN}}{meaning} (default:\xa0{default})"
                text = textwrap.fill(text, 100, subsequent_indent=" " * HELP_COLUMN)
                print(text.replace("\xa0", " "))  # \xa0 kept "(default: ...)" on one line


def main(argv: list[str]) -> None:
    print(config_text(load_config(argv)), end="")


if __name__ == "__main__":
    run_main(main)
