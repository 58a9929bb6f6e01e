"""
Configuration: every key, its default and its meaning, and the rules for overriding them.

    python train.py config/gpt124m_4070.py --batch_size=4    files and flags, left to right
    python train.py --help                                   every key: type, default, meaning
    python configurator.py config/x.py --batch_size=4        print the result as a config file

Where a key is set more than once, the last one wins. A config file is Python. It is run with the
values so far as its variables, so `lr_decay_iters = max_iters` works. The names are nanoGPT's
wherever nanoGPT has one, and so are the defaults, except device, dtype and lr_decay_iters.

sample.py reads its own keys with the functions below: they take the dataclass that lists the keys.
"""

import ast
import contextlib
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from common.console import UserError, did_you_mean, run_main, say


def key(
    default: Any,
    meaning: str,
    choices: tuple = (),
    low: float = -math.inf,
    high: float = math.inf,
    group: str = "",
    free_text: bool = False,
):
    """
    One key: its default, its meaning and the values it may take (low and high included). `group`
    opens a new group in --help. Free text may be blank, and its ~ is not a home folder.
    """
    metadata = dict(
        meaning=meaning, choices=choices, low=low, high=high, group=group, free_text=free_text
    )
    return field(default=default, metadata=metadata)


DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class Config:
    out_dir: str = key("out", "folder for checkpoints, metrics.jsonl and loss.png", group="I/O")
    init_from: str = key(
        "scratch", "scratch | resume | auto (resume or scratch) | gpt2[-medium|-large|-xl] | a path"
    )
    overwrite: bool = key(False, "delete the run that out_dir holds and start from scratch")
    eval_interval: int = key(2000, "iterations between evaluations", low=1)
    eval_iters: int = key(200, "micro-batches to evaluate on, where eval_tokens is 0", low=1)
    eval_tokens: int = key(0, "tokens to evaluate on; 0: eval_iters micro-batches", low=0)
    eval_only: bool = key(False, "evaluate once and exit")
    sample_tokens: int = key(
        0, "tokens of the sample printed after each evaluation; 0: none", low=0
    )
    always_save_checkpoint: bool = key(True, "save at every evaluation, improved or not")
    checkpoint_interval: int = key(0, "save every this many iterations too; 0: off", low=0)
    keep_checkpoints: int = key(2, "newest checkpoints to keep, besides best.pt", low=1)
    log_interval: int = key(1, "iterations between log lines", low=1, group="logging")
    tracker: str = key("none", "also report to", ("none", "wandb", "tensorboard"))
    wandb_log: bool = key(False, "nanoGPT's spelling of tracker = 'wandb'")
    wandb_project: str = key("owt", "wandb project")
    wandb_run_name: str = key("gpt2", "wandb run name")
    dataset: str = key(
        "openwebtext", "folder data/NAME, or a path to token shards; see stream", group="data"
    )
    stream: bool = key(False, "tokenise while training; dataset: files, or the hub's ORG/NAME")
    data_workers: int = key(1, "tokenising processes of a stream; 0: a thread", low=0, high=256)
    batch_size: int = key(12, "sequences in a micro-batch", low=1, high=2**20)
    block_size: int = key(1024, "tokens in a sequence (context length)", low=1)
    gradient_accumulation_steps: int = key(40, "micro-batches per iteration, all ranks", low=1)
    tokens_per_iter: int = key(0, "where set, gives gradient_accumulation_steps; 0: off", low=0)
    model: str = key("gpt2", "fast: learns more per token", ("gpt2", "fast"), group="model")
    n_layer: int = key(12, "transformer blocks", low=1, high=65536)
    n_head: int = key(12, "attention heads; must divide n_embd", low=1, high=65536)
    n_embd: int = key(768, "width", low=1, high=65536)
    dropout: float = key(0.0, "0 for pre-training, 0.1 or more for fine-tuning", low=0.0, high=0.99)
    bias: bool = key(False, "biases in the linear layers and norms (GPT-2: True)")
    tie_weights: bool = key(True, "one matrix for token embedding and output head, as in GPT-2")
    flash: bool = key(True, "fused attention (scaled_dot_product_attention); False: plain products")
    loss_chunk: str = key("auto", "tokens whose logits exist at once; auto: 1024 if not compiled")
    recompute: bool = key(False, "recompute activations in the backward pass: less memory, slower")
    pad_vocab_multiple: int = key(
        128, "pad the vocabulary to a multiple; 1: off", low=1, high=2**16
    )
    optimizer: str = key(
        "adamw", "muon: Muon for matrices, AdamW for the rest", ("adamw", "muon"), group="optimizer"
    )
    learning_rate: float = key(6e-4, "highest learning rate with adamw; muon: see below", low=0.0)
    muon_lr: float = key(0.025, "highest learning rate of hidden matrices with muon", low=0.0)
    embed_lr: float = key(0.004, "the same for embeddings; 0.7 with model=fast", low=0.0)
    head_lr: float = key(0.004, "the same for the output head, tied or not", low=0.0)
    vector_lr: float = key(0.015, "the same for biases and norms", low=0.0)
    muon_momentum: float = key(0.95, "Muon's momentum", low=0.0, high=0.9999999)
    muon_weight_decay: float = key(0.05, "weight decay of hidden matrices with muon", low=0.0)
    weight_decay: float = key(
        0.1, "of matrices and embeddings; muon: of embeddings and head", low=0.0
    )
    beta1: float = key(0.9, "Adam's decay of the mean gradient", low=0.0, high=0.9999999)
    beta2: float = key(0.95, "Adam's decay of the mean squared gradient", low=0.0, high=0.9999999)
    grad_clip: float = key(1.0, "clip the gradient's norm at this value; 0: off", low=0.0)
    max_skips: int = key(10, "stop after this many non-finite updates in a row", low=1)
    max_iters: int = key(600000, "iterations: 0 to max_iters - 1", low=0, group="schedule")
    max_minutes: float = key(0.0, "save and stop after this many minutes; 0: no limit", low=0.0)
    decay_lr: bool = key(True, "decay the learning rate after warm-up")
    lr_schedule: str = key("cosine", "wsd: constant, then linear", ("cosine", "linear", "wsd"))
    decay_fraction: float = key(0.2, "share of the schedule in which wsd decays", low=0.0, high=1.0)
    warmup_iters: int = key(2000, "iterations of linear warm-up", low=0)
    lr_decay_iters: int = key(0, "iteration at which the decay ends; 0: max_iters", low=0)
    min_lr: float = key(6e-5, "final rate; if unset and above a rate, a tenth of it", low=0.0)
    device: str = key("auto", "auto | cuda | cuda:1 | mps | cpu", group="system")
    dtype: str = key("auto", "auto: bfloat16 where native, or float16 on CUDA, or float32", DTYPES)
    backend: str = key("nccl", "nanoGPT's key; accepted, but the device decides the backend")
    compile: bool = key(True, "compile the model; one warning instead where that fails")
    tf32: bool = key(True, "TF32 tensor cores for float32 matrix products on CUDA")
    deterministic: bool = key(False, "the same bits on every run on CUDA, at some cost in speed")
    seed: int = key(1337, "initial weights, dropout, order of the data", low=0, high=2**63 - 1)
    peak_tflops: float = key(0.0, "this device's dense peak for MFU; 0: from gpus.csv", low=0.0)
    # Not a key: the names of the keys that a file or flag has set
    given: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def iter_sequences(self) -> int:
        """Sequences of one iteration, all processes together."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def iter_tokens(self) -> int:
        """Tokens of one iteration, whichever of the keys it follows from."""
        return self.iter_sequences * self.block_size

    @property
    def eval_size(self) -> int:
        """Tokens of each split that an evaluation reads."""
        return self.eval_tokens or self.eval_iters * self.batch_size * self.block_size


def find_keys(keys: type) -> dict[str, Field]:
    """The keys that a dataclass lists, by name."""
    return {f.name: f for f in fields(keys) if f.metadata}


FIELDS = find_keys(Config)
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}

# -----------------------------------------------------------------------------
# Files and flags


def load_config(argv: list[str], checks: tuple[Callable[[Config], list[str]], ...] = ()) -> Config:
    """
    The Config of a command line, with everything that follows from its keys filled in.

    `checks` are functions from a Config to a list of problems (device, data). Raises UserError with
    one line per problem. A file or flag that is wrong in itself hides the other problems, because
    they may only follow from it.
    """
    config, problems = read_config(argv)
    if not problems:
        for check in checks:
            problems += check(config)
        problems += resolve(config)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return config


def read_config(argv: list[str], keys: type = Config) -> tuple[Any, list[str]]:
    """
    Read config files and --key=value flags, left to right: (an object of the dataclass `keys`, what
    is wrong, one line each). `resolve` is the next step for a Config: a resumed run first takes the
    architecture from its checkpoint.
    """
    if "--help" in argv or "-h" in argv:
        print_help(keys)
        sys.exit(0)
    known = find_keys(keys)
    values: dict[str, Any] = {}  # ordered by when each key was last set
    problems: list[str] = []
    for argument in argv:
        if argument.startswith("-") or "=" in argument:
            read_flag(argument, values, problems, known)
        else:
            read_file(Path(argument), values, problems, known)
    given = frozenset(values)
    if not problems:
        switch_off_tokens_per_iter(values)
    return keys(**values, given=given), problems


def switch_off_tokens_per_iter(values: dict[str, Any]) -> None:
    """Let a gradient_accumulation_steps that was set later win; say so."""
    if values.get("tokens_per_iter") and "gradient_accumulation_steps" in values:
        order = list(values)
        if order.index("gradient_accumulation_steps") > order.index("tokens_per_iter"):
            values["tokens_per_iter"] = 0
            steps = values["gradient_accumulation_steps"]
            say(f"tokens_per_iter: switched off by the later gradient_accumulation_steps={steps}")


def read_flag(
    argument: str, values: dict[str, Any], problems: list[str], known: dict[str, Field]
) -> None:
    name, equals, text = argument.lstrip("-").partition("=")
    if not argument.startswith("--"):
        problems.append(f"{argument}: flags are written --key=value")
        return
    if name not in known:
        problems.append(f"--{name}: unknown key{did_you_mean(name, known)}")
        return
    kind = known[name].type
    if not equals and kind is not bool:
        problems.append(f"--{name}: needs a value: --{name}={known[name].default!r}")
        return
    value = parse(text, kind) if equals else True
    if kind is str and not known[name].metadata["free_text"]:
        value = os.path.expanduser(value)  # shells leave the ~ of --key=~/x alone
    set_value(values, name, value, f"--{name}", problems, known)


def read_file(
    path: Path, values: dict[str, Any], problems: list[str], known: dict[str, Field]
) -> None:
    """Run a config file. Keys of Config that are not `known` are those of other scripts."""
    if not os.path.isfile(path):
        folders = (path.parent, Path("config"))
        files = [str(file) for folder in folders for file in sorted(folder.glob("*.py"))]
        problems.append(f"{path}: no such config file{did_you_mean(str(path), files)}")
        return
    namespace = {name: f.default for name, f in (FIELDS | known).items()} | values
    before = dict(namespace)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"), str(path))
        exec(compile(tree, str(path), "exec"), namespace)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a config file raises, even SystemExit
        problems.append(f"{path}:{error_line(error, path)}: {type(error).__name__}: {error}")
        return
    lines = assignment_lines(tree)
    for name in sorted(namespace, key=lambda name: lines.get(name, 0)):
        value = namespace[name]
        if name.startswith("_") or isinstance(value, (ModuleType, FunctionType, type)):
            continue
        if name not in lines and value is before.get(name):
            continue
        if name in known:
            set_value(values, name, value, f"{path}: {name}", problems, known)
        elif name not in FIELDS:
            hint = f"{did_you_mean(name, known)}; a helper variable starts with _"
            problems.append(f"{path}: {name}: unknown key{hint}")


def error_line(error: BaseException, path: Path) -> int:
    """The line of a config file that raised the error."""
    if isinstance(error, SyntaxError):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else 1


def assignment_lines(tree: ast.Module) -> dict[str, int]:
    """The names that a file assigns to, each with the line of its last assignment."""
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[node.id] = max(node.lineno, lines.get(node.id, 0))
    return lines


def parse(text: str, kind: type) -> Any:
    """A flag's text as a Python value, for set_value to judge."""
    if kind is str:
        return text
    if kind is bool and text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def set_value(
    values: dict[str, Any],
    name: str,
    value: Any,
    where: str,
    problems: list[str],
    known: dict[str, Field] = FIELDS,
) -> None:
    """
    Set a key, if the value fits it. A whole float may stand for an int, an int for a float, 0 and 1
    for booleans.
    """
    kind, m = known[name].type, known[name].metadata
    if kind is not str and not isinstance(value, bool):
        with contextlib.suppress(ArithmeticError, TypeError, ValueError):
            if kind(value) == value:
                value = kind(value)
    if type(value) is not kind or kind is float and not math.isfinite(value):
        problems.append(f"{where}: needs {KIND_NAMES[kind]}, got {value!r}")
    elif m["choices"] and value not in m["choices"]:
        hint = did_you_mean(value, m["choices"])
        problems.append(f"{where}: {value!r} is none of {', '.join(m['choices'])}{hint}")
    elif kind in (int, float) and not m["low"] <= value <= m["high"]:
        span = f"{m['low']} and up" if m["high"] == math.inf else f"{m['low']} to {m['high']}"
        problems.append(f"{where}: {value} is outside {span}")
    elif kind is str and not value.strip() and not m["free_text"]:
        problems.append(f"{where}: must not be empty")
    else:
        values.pop(name, None)
        values[name] = value


# -----------------------------------------------------------------------------
# What follows from the keys


def resolve(config: Config) -> list[str]:
    """Fill in what follows from other keys. Returns the combinations that cannot work."""
    problems = check_model(config)
    micro_batch = config.batch_size * config.block_size
    steps, rest = divmod(config.tokens_per_iter, micro_batch)
    if rest:
        nearest = f"{(steps + 1) * micro_batch}"
        if steps:
            nearest = f"{steps * micro_batch} or {nearest}"
        problems.append(
            f"tokens_per_iter: {config.tokens_per_iter:,} is no multiple of "
            f"batch_size * block_size = {micro_batch:,}; nearest: {nearest}"
        )
    elif steps:
        config.gradient_accumulation_steps = steps
    rates = [config.learning_rate]
    if config.optimizer == "muon":
        rates = [config.muon_lr, config.embed_lr, config.head_lr, config.vector_lr]
    if min(rates) < config.min_lr and "min_lr" not in config.given:
        config.min_lr = min(rates) / 10  # a rate must not rise to min_lr
    if config.wandb_log:
        config.tracker = "wandb"
    if config.overwrite and config.init_from in ("resume", "auto"):
        problems.append(
            f"overwrite: would delete the run that init_from={config.init_from} resumes"
        )
    return problems


def check_model(config: Config) -> list[str]:
    """Sizes and switches of the model that do not go together."""
    problems = []
    head_size, rest = divmod(config.n_embd, config.n_head)
    if rest:
        problems.append(
            f"n_head: {config.n_head} does not divide n_embd {config.n_embd}; "
            f"nearest that does: {nearest_divisor(config.n_embd, config.n_head)}"
        )
    chunk = config.loss_chunk
    if chunk not in ("auto", "off") and not (chunk.isdecimal() and int(chunk) > 0):
        problems.append(f"loss_chunk: {chunk!r} is none of auto, off, a number above 0 like 1024")
    if config.model != "fast":
        return problems
    if not rest and head_size % 4:
        problems.append(f"n_head: heads of size {head_size}; model=fast needs a multiple of 4")
    if config.tie_weights:
        problems.append("tie_weights: model=fast has a head of its own; --tie_weights=False")
    if config.dropout > 0:
        problems.append("dropout: model=fast has none; --dropout=0, or --model=gpt2")
    return problems


def nearest_divisor(total: int, wanted: int) -> int:
    """The divisor of `total` that is nearest to `wanted`; the smaller of two."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    return min(divisors, key=lambda n: abs(n - wanted))


# -----------------------------------------------------------------------------
# Printing


def config_values(config: Config) -> dict[str, Any]:
    """The keys and their values, as checkpoints and metrics.jsonl keep them."""
    return {name: getattr(config, name) for name in FIELDS}


def print_config(config: Config) -> str:
    """The configuration as a config file: running that file gives this configuration."""
    lines = []
    for name, f in FIELDS.items():
        if f.metadata["group"]:
            lines += ["", f"# {f.metadata['group']}"]
        lines.append(f"{name} = {getattr(config, name)!r}")
    return "\n".join(lines[1:]) + "\n"


def print_help(keys: type = Config) -> None:
    script = os.path.basename(sys.argv[0])
    print(f"usage: python {script} [config.py ...] [--key=value ...]   (applied left to right)")
    for name, f in find_keys(keys).items():
        m = f.metadata
        if m["group"]:
            print(f"\n{m['group']}:")
        flag = f"--{name}={f.default!r}"
        choices = f" ({' | '.join(m['choices'])})" if m["choices"] else ""
        print(f"  {flag:<34} {f.type.__name__:<6} {m['meaning']}{choices}")


def main(argv: list[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print_help()
        return
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the config file and nothing else
        config = load_config(argv)
    print(print_config(config), end="")


if __name__ == "__main__":
    run_main(main)
