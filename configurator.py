"""
Configuration: every key, its default and its meaning, and the rules for overriding them.

    python train.py config/gpt124m_4070.py --batch_size=4      files and flags are applied left to right
    python train.py --help                                     every key with type, default and meaning
    python configurator.py config/x.py --lr_schedule=linear    print the resolved configuration as a config file

A config file is Python. It is run with the values so far as its variables, so `lr_decay_iters =
max_iters` works. The names are nanoGPT's wherever nanoGPT has one, and so are the defaults, except
device, dtype and lr_decay_iters.
"""

import ast
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from common.console import UserError, did_you_mean, run_main


def key(
    default: Any,
    meaning: str,
    choices: tuple = (),
    low: float = -math.inf,
    high: float = math.inf,
    group: str = "",
):
    """
    One key: its default, its meaning, the values it may take (low and high included); `group` opens
    a new group.
    """
    return field(
        default=default,
        metadata=dict(meaning=meaning, choices=choices, low=low, high=high, group=group),
    )


DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class Config:
    out_dir: str = key("out", "folder for checkpoints, metrics.jsonl and loss.png", group="I/O")
    init_from: str = key(
        "scratch",
        "scratch | resume | auto (resume if out_dir holds a run) | gpt2[-medium|-large|-xl] | path",
    )
    overwrite: bool = key(
        False, "start from scratch in an out_dir that holds another run, deleting that run's files"
    )
    eval_interval: int = key(2000, "iterations between evaluations", low=1)
    eval_iters: int = key(200, "evaluation size in micro-batches, where eval_tokens is 0", low=1)
    eval_tokens: int = key(
        0, "evaluation size in tokens of each split; 0: eval_iters * batch_size * block_size", low=0
    )
    eval_only: bool = key(False, "evaluate once and exit")
    sample_tokens: int = key(
        0, "print a sample of this many tokens after each evaluation; 0: none", low=0
    )
    always_save_checkpoint: bool = key(
        True, "save at every evaluation, not only when the validation loss improves"
    )
    checkpoint_interval: int = key(
        0, "also save every this many iterations; 0: at evaluations only", low=0
    )
    keep_checkpoints: int = key(
        2, "how many of the newest checkpoints to keep (best.pt is kept besides)", low=1
    )
    log_interval: int = key(1, "iterations between log lines", low=1, group="logging")
    tracker: str = key("none", "also report to", ("none", "wandb", "tensorboard"))
    wandb_log: bool = key(False, "nanoGPT's spelling of tracker = 'wandb'")
    wandb_project: str = key("owt", "wandb project")
    wandb_run_name: str = key("gpt2", "wandb run name")
    dataset: str = key(
        "openwebtext",
        "folder data/NAME, or a path to any folder of token shards; see stream",
        group="data",
    )
    stream: bool = key(
        False,
        "tokenise while training; dataset names parquet or jsonl files, or ORG/NAME[:CONFIG] of the hub",
    )
    data_workers: int = key(
        1, "processes that tokenise a stream; 0: a thread of this one", low=0, high=256
    )
    batch_size: int = key(12, "sequences in a micro-batch", low=1, high=2**20)
    block_size: int = key(1024, "tokens in a sequence (context length)", low=1)
    gradient_accumulation_steps: int = key(
        40, "micro-batches per iteration, all processes together", low=1
    )
    tokens_per_iter: int = key(
        0,
        "tokens per iteration; where set, gradient_accumulation_steps follows from it; 0: off",
        low=0,
    )
    model: str = key(
        "gpt2",
        "GPT-2, or the fast recipe's model, which learns more per token",
        ("gpt2", "fast"),
        group="model",
    )
    n_layer: int = key(12, "transformer blocks", low=1)
    n_head: int = key(12, "attention heads; must divide n_embd", low=1, high=65536)
    n_embd: int = key(768, "width", low=1, high=65536)
    dropout: float = key(
        0.0, "0 for pre-training, 0.1 and more for fine-tuning", low=0.0, high=0.99
    )
    bias: bool = key(False, "biases in the linear layers and norms (GPT-2: True)")
    tie_weights: bool = key(True, "one matrix for token embedding and output head, as in GPT-2")
    flash: bool = key(True, "fused attention (scaled_dot_product_attention); False: plain products")
    loss_chunk: str = key(
        "auto",
        "tokens whose logits exist at once in training; auto: 1024 with compile=False, else off",
    )
    recompute: bool = key(
        False, "compute each block's activations again in the backward pass: less memory, more time"
    )
    pad_vocab_multiple: int = key(
        128, "round the vocabulary up to a multiple: 50257 -> 50304; 1: unpadded", low=1, high=2**16
    )
    optimizer: str = key(
        "adamw",
        "muon: Muon for hidden matrices, AdamW for the rest",
        ("adamw", "muon"),
        group="optimizer",
    )
    learning_rate: float = key(
        6e-4, "highest learning rate with adamw; muon has the four rates below instead", low=0.0
    )
    muon_lr: float = key(0.025, "highest learning rate of hidden matrices with muon", low=0.0)
    embed_lr: float = key(
        0.004, "the same of embeddings; the fast model's, of size 1, stand 0.7", low=0.0
    )
    head_lr: float = key(0.004, "the same of the output head, tied or not", low=0.0)
    vector_lr: float = key(0.015, "the same of biases and norms", low=0.0)
    muon_momentum: float = key(0.95, "muon's decay of the mean gradient", low=0.0, high=0.9999999)
    muon_weight_decay: float = key(0.05, "weight decay of hidden matrices with muon", low=0.0)
    weight_decay: float = key(
        0.1, "weight decay of matrices and embeddings; with muon of embeddings and head", low=0.0
    )
    beta1: float = key(0.9, "Adam's decay of the mean gradient", low=0.0, high=0.9999999)
    beta2: float = key(0.95, "Adam's decay of the mean squared gradient", low=0.0, high=0.9999999)
    grad_clip: float = key(1.0, "clip the gradient's norm at this value; 0: off", low=0.0)
    max_skips: int = key(
        10, "stop after this many updates in a row skipped for a non-finite gradient", low=1
    )
    max_iters: int = key(600000, "iterations: 0 to max_iters - 1", low=0, group="schedule")
    max_minutes: float = key(0.0, "save and stop after this many minutes; 0: no limit", low=0.0)
    decay_lr: bool = key(True, "decay the learning rate after warm-up")
    lr_schedule: str = key(
        "cosine", "shape of the decay; wsd: constant, then linear", ("cosine", "linear", "wsd")
    )
    decay_fraction: float = key(0.2, "share of the schedule in which wsd decays", low=0.0, high=1.0)
    warmup_iters: int = key(2000, "iterations of linear warm-up", low=0)
    lr_decay_iters: int = key(0, "iteration at which the decay ends; 0: max_iters", low=0)
    min_lr: float = key(
        6e-5,
        "learning rate at the end of the decay; not given, a tenth of a rate below it",
        low=0.0,
    )
    device: str = key("auto", "auto | cuda | cuda:1 | mps | cpu", group="system")
    dtype: str = key(
        "auto", "auto: bfloat16 where native, else float16 on CUDA, else float32", DTYPES
    )
    compile: bool = key(
        True, "torch.compile the model; falls back with one warning where no compiler works"
    )
    tf32: bool = key(True, "TF32 tensor cores for float32 matrix products on CUDA")
    deterministic: bool = key(False, "the same bits on every run on CUDA, at some cost in speed")
    seed: int = key(
        1337, "initial weights, dropout and the order of the data", low=0, high=2**63 - 1
    )
    peak_tflops: float = key(
        0.0, "this device's dense peak for MFU, in place of gpus.csv's; 0: look it up", low=0.0
    )
    # Not a key: the names of those that a file or flag has set.
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


FIELDS = {f.name: f for f in fields(Config) if f.metadata}
BOOLEANS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}
KIND_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
}


def read_config(argv: list[str]) -> tuple["Config", list[str]]:
    """
    The Config of config files and --key=value flags, applied left to right, and what is wrong with
    them, one line per problem.
    """
    if "--help" in argv or "-h" in argv:
        print_help()
        sys.exit(0)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for argument in argv:
        if argument.startswith("-") or "=" in argument:
            read_flag(argument, values, problems)
        else:
            read_file(Path(argument), values, problems)
    return Config(**values, given=frozenset(values)), problems


def load_config(argv: list[str], checks: tuple[Callable[[Config], list[str]], ...] = ()) -> Config:
    """
    The resolved Config of config files and flags. `checks` list further problems of a Config.
    Raises UserError with one line per problem.
    """
    config, problems = read_config(argv)
    if not problems:
        for check in (*checks, resolve):
            problems += check(config)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return config


def read_flag(argument: str, values: dict[str, Any], problems: list[str]) -> None:
    name, equals, text = argument.lstrip("-").partition("=")
    if not argument.startswith("--"):
        problems.append(f"{argument}: flags are written --key=value")
    elif name not in FIELDS:
        problems.append(f"--{name}: unknown key{did_you_mean(name, FIELDS)}")
    elif not equals and FIELDS[name].type is not bool:
        problems.append(f"--{name}: needs a value: --{name}={FIELDS[name].default}")
    else:
        set_value(
            values, name, parse(text, FIELDS[name].type) if equals else True, f"--{name}", problems
        )


def read_file(path: Path, values: dict[str, Any], problems: list[str]) -> None:
    if not path.is_file():
        known = [
            str(p) for folder in (path.parent, Path("config")) for p in sorted(folder.glob("*.py"))
        ]
        problems.append(f"{path}: no such config file{did_you_mean(str(path), known)}")
        return
    namespace = {name: f.default for name, f in FIELDS.items()} | values
    before = dict(namespace)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"), str(path))
        exec(compile(tree, str(path), "exec"), namespace)
    except KeyboardInterrupt:
        raise
    except (
        BaseException
    ) as error:  # a config file may do anything; whatever it raises is the user's to see
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        problems.append(f"{path}:{line or 1}: {type(error).__name__}: {error}")
        return
    problems += assigned_twice(path, tree)
    assigned = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for name, value in namespace.items():
        untouched = name not in assigned and value is before.get(name)
        if untouched or name.startswith("_") or isinstance(value, (ModuleType, FunctionType, type)):
            continue
        if name in FIELDS:
            set_value(values, name, value, f"{path}: {name}", problems)
        else:
            problems.append(
                f"{path}: {name}: unknown key{did_you_mean(name, FIELDS)}; a helper variable starts with _"
            )


def assigned_twice(path: Path, tree: ast.Module) -> list[str]:
    """Two plain assignments of a constant to one key: the upper one was forgotten."""
    lines: dict[str, int] = {}
    problems = []
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.targets[0], ast.Name)
        ):
            name = node.targets[0].id
            if lines.setdefault(name, node.lineno) != node.lineno:
                problems.append(
                    f"{path}:{node.lineno}: {name}: already set on line {lines[name]}; keep one"
                )
    return problems


def parse(text: str, kind: type) -> Any:
    """A flag's text as a Python value, for set_value to judge."""
    if kind is bool:
        return BOOLEANS.get(text.lower(), text)
    try:
        return (
            os.path.expanduser(text) if kind is str else ast.literal_eval(text)
        )  # shells leave the ~ of --key=~/x alone
    except (ValueError, SyntaxError):
        return text


def set_value(
    values: dict[str, Any], name: str, value: Any, where: str, problems: list[str]
) -> None:
    """
    Set a key, if the value fits it: a whole float serves as an int, an int as a float, 0 and 1 as
    booleans.
    """
    kind, choices, low, high = (
        FIELDS[name].type,
        *(FIELDS[name].metadata[k] for k in ("choices", "low", "high")),
    )
    try:
        if kind is not str and not isinstance(value, bool) and kind(value) == value:
            value = kind(value)
    except (ArithmeticError, TypeError, ValueError):
        pass
    if type(value) is not kind or kind is float and not math.isfinite(value):
        problems.append(f"{where}: needs {KIND_NAMES[kind]}, got {value!r}")
    elif choices and value not in choices:
        problems.append(
            f"{where}: {value!r} is none of {', '.join(choices)}{did_you_mean(value, choices)}"
        )
    elif kind in (int, float) and not low <= value <= high:
        problems.append(
            f"{where}: {value} is outside {low} to {high}".replace(" to inf", " and up")
        )
    elif kind is str and not value.strip():
        problems.append(f"{where}: must not be empty")
    else:
        values[name] = value


def resolve(config: Config) -> list[str]:
    """Fill in what follows from other keys; list the combinations that cannot work."""
    problems = []
    if config.n_embd % config.n_head:
        fits = [n for n in range(1, config.n_embd + 1) if config.n_embd % n == 0]
        nearest = min(fits, key=lambda n: abs(n - config.n_head))
        problems.append(
            f"n_head: {config.n_head} does not divide n_embd {config.n_embd}; nearest that does: {nearest}"
        )
    elif config.model == "fast" and config.n_embd // config.n_head % 4:
        size = config.n_embd // config.n_head
        problems.append(
            f"n_head: {config.n_head} makes heads of size {size}; model=fast needs a multiple of 4"
        )
    if config.loss_chunk not in ("auto", "off") and not (
        config.loss_chunk.isdecimal() and int(config.loss_chunk)
    ):
        problems.append(
            f"loss_chunk: {config.loss_chunk!r} is none of auto, off, a number above 0 such as 1024"
        )
    if config.model == "fast":
        problems += [
            "tie_weights: model=fast has a head of its own; --tie_weights=False"
        ] * config.tie_weights
        problems += ["dropout: model=fast has none; --dropout=0, or --model=gpt2"] * (
            config.dropout > 0
        )
    micro_batch = config.batch_size * config.block_size
    if config.tokens_per_iter:
        steps, rest = divmod(config.tokens_per_iter, micro_batch)
        if rest:
            nearest = [n * micro_batch for n in (steps, steps + 1) if n]
            problems.append(
                f"tokens_per_iter: {config.tokens_per_iter:,} is no multiple of batch_size * block_size = {micro_batch:,}; "
                f"nearest: {' or '.join(map(str, nearest))}"
            )
        else:
            config.gradient_accumulation_steps = steps
    rates = (
        ("learning_rate",)
        if config.optimizer == "adamw"
        else ("muon_lr", "embed_lr", "head_lr", "vector_lr")
    )
    lowest = min(getattr(config, name) for name in rates)
    if lowest < config.min_lr and "min_lr" not in config.given:  # to which it would rise
        config.min_lr = lowest / 10
    if config.wandb_log:
        config.tracker = "wandb"
    if config.init_from in ("resume", "auto") and config.overwrite:
        problems.append(
            f"overwrite: deletes the run that init_from={config.init_from} goes on with; drop one of the two"
        )
    return problems


def config_values(config: Config) -> dict[str, Any]:
    """The keys and their values, as checkpoints and metrics.jsonl keep them."""
    return {name: getattr(config, name) for name in FIELDS}


def print_config(config: Config) -> str:
    """The configuration as a config file: running that file gives this configuration."""
    lines = []
    for name, f in FIELDS.items():
        lines += ["", f"# {f.metadata['group']}"] if f.metadata["group"] else []
        lines.append(f"{name} = {getattr(config, name)!r}")
    return "\n".join(lines[1:]) + "\n"


def print_help() -> None:
    print(
        f"usage: python {os.path.basename(sys.argv[0])} [config.py ...] [--key=value ...]   (applied left to right)"
    )
    for name, f in FIELDS.items():
        if f.metadata["group"]:
            print(f"\n{f.metadata['group']}:")
        choices = f" ({' | '.join(f.metadata['choices'])})" if f.metadata["choices"] else ""
        print(
            f"  --{f'{name}={f.default!r}':<32} {f.type.__name__:<6} {f.metadata['meaning']}{choices}"
        )


def main(argv: list[str]) -> None:
    print(print_config(load_config(argv)), end="")


if __name__ == "__main__":
    run_main(main)
