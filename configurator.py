"""
Configuration: every key, its default and its meaning, and the rules for overriding them.

    python train.py config/gpt124m_4070.py --batch_size=4    files and flags, left to right
    python train.py --help                                   every key: type, default, meaning
    python configurator.py config/x.py --batch_size=4        print the result as a config file

Where a key is set more than once, the last one wins. A config file is Python. It is run with the
values so far as its variables, so `lr_decay_iters = max_iters` works. The names are nanoGPT's
wherever nanoGPT has one, and so are the defaults, except device, dtype and lr_decay_iters.

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
import traceback
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from common.console import UserError, did_you_mean, raise_if_any, run_main
from common.files import read_text

MUON_LEARNING_RATE = 0.025  # learning_rate's default with optimizer=muon
NEVER = 2**40  # as a number of iterations: the clock decides


@dataclass
class Config:
    # I/O
    out_dir: str = "out"  # folder for checkpoints, metrics.jsonl and loss.png
    init_from: str = "scratch"  # scratch | resume | auto: resume if it can | gpt2* | path
    eval_interval: int = 2000  # iterations between evaluations
    eval_iters: int = 200  # micro-batches to evaluate on if eval_tokens is 0
    eval_tokens: int = 0  # tokens to evaluate on; 0: eval_iters micro-batches
    eval_only: bool = False  # evaluate once and exit
    sample_tokens: int = 0  # length of the sample after each evaluation; 0: none
    always_save_checkpoint: bool = True  # save at every evaluation, even if not improved
    checkpoint_interval: int = 0  # iterations between saves; 0: ten minutes
    keep_checkpoints: int = 2  # newest checkpoints to keep, besides best.pt
    # logging
    log_interval: int = 1  # iterations between log lines
    tracker: str = "none"  # none | wandb | tensorboard: also log there
    wandb_project: str = "owt"  # wandb project
    wandb_run_name: str = "gpt2"  # wandb run name
    # data
    dataset: str = "openwebtext"  # a folder in data/, or a path to a folder
    stream: bool = False  # prepare while training; dataset: files, or ORG/NAME on the hub
    tokenizer: str = "gpt2"  # with stream=True: gpt2, byte, or the path of a tokenizer.json
    data_workers: int = 1  # threads that tokenise a stream
    batch_size: int = 12  # sequences in a micro-batch
    block_size: int = 1024  # tokens in a sequence (context length)
    gradient_accumulation_steps: int = 40  # micro-batches per iteration
    tokens_per_iter: int = 0  # sets gradient_accumulation_steps; 0: off
    # model
    model: str = "gpt2"  # gpt2 | fast: needs fewer tokens
    n_layer: int = 12  # transformer blocks
    n_head: int = 12  # attention heads; must divide n_embd
    n_embd: int = 768  # width
    dropout: float = 0.0  # 0.1 or more for fine-tuning and small texts
    bias: bool = False  # biases in the linear layers and norms (GPT-2: True)
    tie_weights: bool = True  # share token embedding and output head; fast: False
    flash: bool = True  # fused attention (scaled_dot_product_attention)
    loss_chunk: str = "auto"  # compute the loss this many tokens at a time: auto | off | N
    recompute: bool = False  # recompute activations in the backward pass: less memory, slower
    value_tables: int = 0  # model=fast: value embeddings; cost no FLOPs
    bigram_rows: int = 0  # model=fast: bigram embedding; 0: none
    pad_vocab_multiple: int = 128  # round the vocabulary up; 1: off
    # optimizer
    optimizer: str = "adamw"  # adamw | muon: for hidden matrices
    learning_rate: float = 6e-4  # peak rate (muon: of hidden matrices, 0.025)
    head_lr: float = 0.004  # optimizer=muon: peak rate of the head
    muon_momentum: float = 0.95  # optimizer=muon: momentum
    weight_decay: float = 0.1  # of matrices, embeddings; muon: embeddings, head
    beta1: float = 0.9  # Adam's decay of the mean gradient
    beta2: float = 0.95  # Adam's decay of the mean squared gradient
    grad_clip: float = 1.0  # clip the gradient's norm at this value; 0: off
    # schedule
    max_iters: int = 600000  # iterations
    hours: float = 0.0  # train this many hours instead of max_iters
    until: str = ""  # train until this time, such as 07:00
    max_minutes: float = 0.0  # save and stop after this many minutes; 0: no limit
    lr_schedule: str = "cosine"  # cosine | linear | constant | wsd: constant, then linear
    decay_fraction: float = 0.2  # lr_schedule=wsd: share that decays
    warmup_iters: int = 2000  # iterations of linear warmup
    lr_decay_iters: int = 0  # iteration at which the decay ends; 0: max_iters
    min_lr: float = 6e-5  # final rate; if unset, below the peak
    # system
    device: str = "auto"  # auto | cuda | cuda:1 | mps | cpu
    dtype: str = "auto"  # float32 | bfloat16 | float16 | auto: the fastest here
    compile: bool = True  # use torch.compile; if that fails, warn and train without it
    tf32: bool = True  # TF32 tensor cores for float32 matmuls on CUDA
    deterministic: bool = False  # bit-identical runs on CUDA, somewhat slower
    seed: int = 1337  # initial weights, dropout, order of the data
    peak_tflops: float = 0.0  # dense peak, for MFU; 0: from gpus.csv
    given: frozenset[str] = field(default=frozenset(), compare=False)  # keys that are set; no key

    @property
    def by_clock(self) -> bool:
        """Whether the schedule follows the time and not the iterations."""
        return bool(self.hours or self.until)

    @property
    def iter_sequences(self) -> int:
        """Sequences of one iteration, all processes together."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def iter_tokens(self) -> int:
        """Tokens of one iteration, all processes together."""
        return self.iter_sequences * self.block_size

    @property
    def eval_size(self) -> int:
        """Tokens of each split that an evaluation reads."""
        return self.eval_tokens or self.eval_iters * self.batch_size * self.block_size


@dataclass
class NanoGPTKeys:
    """nanoGPT's keys that have other names here. Files and flags may use them: see `translate`."""

    backend: str = "nccl"  # nothing: the device decides
    wandb_log: bool = False  # tracker=wandb; False: tracker=none
    decay_lr: bool = True  # lr_schedule=cosine; False: lr_schedule=constant


def find_keys(keys: type) -> dict[str, Field]:
    """The keys that a dataclass lists, by name."""
    return {f.name: f for f in fields(keys) if f.name != "given"}


FIELDS, NANOGPT_FIELDS = find_keys(Config), find_keys(NanoGPTKeys)
# What keys may hold, besides their type; of sample.py too. Other numbers are 0 or more
CHOICES: dict[str, tuple[str, ...]] = dict(
    model=("gpt2", "fast"),
    optimizer=("adamw", "muon"),
    lr_schedule=("cosine", "linear", "constant", "wsd"),
    dtype=("float32", "bfloat16", "float16", "auto"),
    tracker=("none", "wandb", "tensorboard"),
)
AT_LEAST_1 = """
    eval_interval eval_iters keep_checkpoints log_interval data_workers batch_size block_size
    gradient_accumulation_steps n_layer n_head n_embd pad_vocab_multiple num_samples max_new_tokens
""".split()
BELOW_1 = ("dropout", "beta1", "beta2", "muon_momentum")
MAY_BE_BLANK = ("until", "start")
# the choice that reads a key; with another one it must keep its default
READ_BY = dict(
    value_tables="model=fast",
    bigram_rows="model=fast",
    head_lr="optimizer=muon",
    muon_momentum="optimizer=muon",
    decay_fraction="lr_schedule=wsd",
)
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}

# -----------------------------------------------------------------------------
# Files and flags


def load_config(argv: list[str], checks: Sequence[Callable[[Config], list[str]]] = ()) -> Config:
    """
    The Config of a command line, with everything that follows from its keys filled in. `checks` are
    functions from a Config to a list of problems. Raises UserError with one line per problem.
    """
    config = read_config(argv)
    raise_if_any([line for check in checks for line in check(config)] + resolve(config))
    return config


def read_config(argv: list[str], keys: type = Config) -> Any:
    """
    Read config files and --key=value flags, left to right, into an object of the dataclass `keys`.
    Raises UserError with one line per problem. A Config still needs `resolve`.
    """
    if "--help" in argv or "-h" in argv:
        print_help(keys)
        sys.exit(0)
    known = find_keys(keys) | (NANOGPT_FIELDS if keys is Config else {})
    values: dict[str, Any] = {}
    flags: set[str] = set()  # the keys that flags have set, not files
    problems: list[str] = []
    for argument in argv:
        try:
            if argument.startswith("-") or "=" in argument:
                found = read_flag(argument, known)
                flags |= found.keys()
            else:
                found = read_file(Path(argument), known, values)
        except UserError as error:
            problems += error.problems
            continue
        values |= translate(found)
        if "gradient_accumulation_steps" in found and "tokens_per_iter" not in found:
            values["tokens_per_iter"] = 0  # of the two the last one wins
    raise_if_any(problems)
    if values.get("hours") or values.get("until"):
        # config files have these for runs by iterations
        values |= {n: NEVER for n in ("max_iters", "lr_decay_iters") if n not in flags}
        values.setdefault("eval_interval", NEVER)
    return keys(**values, given=frozenset(values))


def translate(found: dict[str, Any]) -> dict[str, Any]:
    """
    What a file, a flag or a checkpoint sets, with nanoGPT's names replaced by ours. If both names
    are set, ours wins.
    """
    keys = {name: value for name, value in found.items() if name not in NANOGPT_FIELDS}
    if "wandb_log" in found:
        keys.setdefault("tracker", "wandb" if found["wandb_log"] else "none")
    if "decay_lr" in found:
        keys.setdefault("lr_schedule", "cosine" if found["decay_lr"] else "constant")
        if not found["decay_lr"]:
            keys.setdefault("warmup_iters", 0)  # nanoGPT has no warmup then
    return keys


def read_flag(argument: str, known: dict[str, Field]) -> dict[str, Any]:
    """The key and value of a flag. Raises UserError."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if not (argument.startswith("--") and equals):
        raise UserError(f"{argument}: flags are written --key=value")
    if name not in known:
        raise UserError(f"--{name}: unknown key{did_you_mean(name, known)}")
    value: Any = parse(text, known[name].type)
    if name in ("out_dir", "init_from", "dataset", "tokenizer"):
        value = os.path.expanduser(value)  # shells do not expand the ~ in --key=~/x
    return {name: fit(value, known[name], f"--{name}")}


def read_file(path: Path, known: dict[str, Field], values: dict[str, Any]) -> dict[str, Any]:
    """
    Run a config file with the `values` so far as its variables. Returns the keys that it sets, in
    order. Keys of train.py that are not `known` to this script are skipped. Raises UserError.
    """
    if not path.is_file():
        files = map(str, Path("config").glob("*.py"))
        raise UserError(f"{path}: no such config file{did_you_mean(str(path), files)}")
    if path.suffix != ".py":
        raise UserError(f"{path}: not a config file; data/prepare_text.py makes one for a text")
    defaults = {name: f.default for name, f in (NANOGPT_FIELDS | FIELDS | known).items()}
    # the values so far are among the builtins, so that `variables` holds only what the file sets
    variables = {"__file__": str(path), "__builtins__": vars(builtins) | defaults | values}
    try:
        tree = ast.parse(read_text(path, errors="strict"), str(path))
        exec(compile(tree, str(path), "exec"), variables)
    except (Exception, SystemExit) as error:
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        said = traceback.format_exception_only(error)[-1].strip()
        raise UserError(f"{path}:{getattr(error, 'lineno', line)}: {said}") from None
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and type(n.ctx) is ast.Load}
    found, problems = {}, []
    for name, value in variables.items():
        plain = isinstance(value, bool | int | float | str)  # no import and no function
        if name in known:
            try:
                found[name] = fit(value, known[name], name)
            except UserError as error:
                problems.append(f"{path}: {error}")
        elif plain and not (name in defaults or name in read or name.startswith("_")):
            problems.append(f"{path}: {name}: unknown key{did_you_mean(name, known)}")
    raise_if_any(problems)
    return found


def parse(text: str, kind: Any) -> Any:
    """A flag's text as a Python value. Text that is not a Python value stays text."""
    if kind is bool and text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text)  # as nanoGPT does: --start='"\n"'
        if isinstance(value, str) or kind in (int, float):
            return value
    return text


def fit(value: Any, f: Field, where: str) -> Any:
    """
    The value in the key's type. A whole float may stand for an int, an int for a float, 0 and 1 for
    booleans. Raises UserError if the value does not fit the key.
    """
    kind: Any = f.type
    problem = ""
    if kind is not str and not isinstance(value, bool):
        with contextlib.suppress(ArithmeticError, TypeError, ValueError):
            value = kind(value) if kind(value) == value else value
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        problem = f"needs {KIND_NAMES[kind]}"
    elif f.name in CHOICES and value not in CHOICES[f.name]:
        problem = f"is one of {', '.join(CHOICES[f.name])}{did_you_mean(value, CHOICES[f.name])}"
    elif kind in (int, float) and value < (f.name in AT_LEAST_1):
        problem = f"must be {int(f.name in AT_LEAST_1)} or more"
    elif f.name in BELOW_1 and value >= 1:
        problem = "must be below 1"
    elif kind is str and not value.strip() and f.name not in MAY_BE_BLANK:
        problem = "must not be empty"
    if problem:
        raise UserError(f"{where}: {problem}, got {value!r:.60}")
    return value


# -----------------------------------------------------------------------------
# What follows from the keys


def resolve(config: Config) -> list[str]:
    """Fill in what follows from other keys. Returns the combinations that cannot work."""
    if config.model == "fast" and "tie_weights" not in config.given:
        config.tie_weights = False
    if config.optimizer == "muon" and "learning_rate" not in config.given:
        config.learning_rate = MUON_LEARNING_RATE
    problems = check_model(config)
    micro_batch = config.batch_size * config.block_size
    steps, rest = divmod(config.tokens_per_iter, micro_batch)
    if rest:
        problem = f"tokens_per_iter: {config.tokens_per_iter:,} is not a multiple of"
        problems.append(f"{problem} batch_size * block_size = {micro_batch:,}")
    elif steps:
        config.gradient_accumulation_steps = steps
    highest = config.learning_rate
    if config.optimizer == "muon":
        highest = min(highest, config.head_lr)  # those of embeddings are far above min_lr
    if highest < config.min_lr and "min_lr" not in config.given:
        config.min_lr = highest / 10  # a rate must not rise to min_lr
    if config.until and config.hours:
        problems.append("until: hours is set too; give one of them")
    elif config.until and not re.fullmatch(r"([01]?\d|2[0-3]):[0-5]\d", config.until):
        problems.append(f"until: {config.until!r}; write a clock time, --until=07:00")
    if config.tokenizer != "gpt2" and not config.stream:
        problems.append("tokenizer: a data folder has its own; leave it out, or --stream=True")
    return problems


def check_model(config: Config) -> list[str]:
    """The sizes and switches of the model that cannot be combined."""
    problems = []
    head_size, rest = divmod(config.n_embd, config.n_head)
    if rest:
        problems.append(f"n_head: {config.n_head} must divide n_embd {config.n_embd}")
    if not re.fullmatch(r"auto|off|[1-9][0-9]{0,8}", config.loss_chunk):
        problems.append(f"loss_chunk: {config.loss_chunk!r} is none of auto, off, a number above 0")
    for name, reader in READ_BY.items():
        choice, _, value = reader.partition("=")
        if getattr(config, choice) != value and getattr(config, name) != FIELDS[name].default:
            problems.append(f"{name}: only {reader} reads it; leave it out")
    if config.model == "fast":
        if 2 * config.value_tables > config.n_layer:
            problems.append(f"value_tables: two layers share one; {config.n_layer // 2} or less")
        if not rest and head_size % 4:
            problems.append(f"n_head: heads of size {head_size}; model=fast needs a multiple of 4")
        if config.tie_weights:
            problems.append("tie_weights: model=fast has a head of its own; --tie_weights=False")
    return problems


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


# -----------------------------------------------------------------------------
# Printing


def config_values(config: Config) -> dict[str, Any]:
    """The keys and their values, as checkpoints and metrics.jsonl keep them."""
    return {name: getattr(config, name) for name in FIELDS}


def print_config(config: Config) -> str:
    """The configuration as a config file: running that file gives this configuration."""
    return "".join(f"{name} = {value!r}\n" for name, value in config_values(config).items())


def print_help(keys: type = Config) -> None:
    """The table of the keys, as it stands in the code."""
    script = os.path.basename(sys.argv[0])
    print(f"usage: python {script} [config.py ...] [--key=value ...]   (applied left to right)")
    for line in inspect.getsource(keys).splitlines():
        if re.match(r"    (# |\w+: \w+ = )", line):
            print(line.strip())


def main(argv: list[str]) -> None:
    print(print_config(load_config(argv)), end="")


if __name__ == "__main__":
    run_main(main)
