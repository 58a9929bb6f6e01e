"""
Sample from a trained model.

    python sample.py --out_dir=out/gpt124m                 a run: the model of its best evaluation
    python sample.py config/gpt124m_4070.py --start="The"  the run of a training config; a prompt
    python sample.py --init_from=gpt2-xl --num_samples=1   OpenAI's weights
    python sample.py --init_from=out/gpt124m/best.pt       any file or folder that convert.py reads
    python sample.py --help                                every key

On a terminal and without --start it asks for prompts, and answers each with one sample. Elsewhere
it samples without a prompt.

Keys are set as for train.py, by config files and --key=value. Training keys in a config file are
ignored. All samples are one batch: the first is printed while it grows, the others after it. A
sample ends at an end-of-text token.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from common.console import print_err, printable, raise_if_any, run_main, warn
from common.files import read_text
from configurator import Config, read_config
from data.tokenizer import Tokenizer
from model import GPT, generate_tokens
from model_fast import FastGPT, build_model, config_from_dict
from training import hardware
from training.pretrained import load_weights, read_weights

RULER = "---------------"
END_OF_TEXT = "<|endoftext|>"


@dataclass
class SampleConfig:
    """
    python sample.py --out_dir=out/quickstart
    python sample.py --init_from=gpt2 --start="Once upon a time"
    """

    init_from: str = "resume"  # resume: the run in out_dir; gpt2 .. gpt2-xl; or a path
    out_dir: str = "out"  # a run's folder, for init_from=resume
    start: str = "\n"  # the prompt, or FILE:name; may hold <|endoftext|>
    num_samples: int = 10  # samples per prompt; 1 for a typed prompt
    max_new_tokens: int = 500  # longest sample, in tokens
    temperature: float = 0.8  # 0: the likeliest token; 1: as the model predicts
    top_k: int = 200  # draw from the k likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the fewest tokens that have this probability together; 1: all
    seed: int = 1337  # of the random numbers
    device: str = "auto"  # auto | cuda | cuda:1 | mps | cpu
    dtype: str = "auto"  # of the weights
    compile: bool = False  # torch.compile the model: slower at first
    # Not keys, but sets of key names: those that a file or a flag set, and those that a flag set.
    set_keys: frozenset[str] = field(default=frozenset(), compare=False)
    typed: frozenset[str] = field(default=frozenset(), compare=False)


def read_prompt(start: str) -> str:
    """The prompt, from its file if `start` names one. Raises OSError."""
    if not start.startswith("FILE:"):
        return start
    return read_text(Path(start.removeprefix("FILE:")).expanduser())


def ask_prompts() -> Iterator[str]:
    """Typed lines, until an empty one or the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() arrow keys and a history
    print_err("type a prompt; an empty line ends, Ctrl-C ends a sample")
    with contextlib.suppress(EOFError):
        while prompt := input("> "):
            yield prompt
    print()  # after Ctrl-D the cursor is behind the >


def encode(prompt: str, text: Tokenizer) -> list[int]:
    """The prompt's tokens; for an empty prompt, the tokenizer's start_ids()."""
    if text.kind == "char":
        unknown = sorted(set(prompt) - set(text.decode(range(text.vocab))))
        if unknown:
            warn(f"start: the model does not know {''.join(unknown)!r}; left out")
    parts = prompt.split(END_OF_TEXT) if text.eot is not None else [prompt]
    ids = []
    for part in parts:
        ids += [text.eot, *(int(token) for token in text.encode(part))]
    return ids[1:] or text.start_ids()


def load_model(state: dict, c: SampleConfig) -> GPT | FastGPT:
    """The model on its device."""
    hw = hardware.set_up(Config(device=c.device, dtype=c.dtype))
    config = config_from_dict(state["model_config"])
    model = build_model(replace(config, flash=hw.flash(config)))
    load_weights(model, state)
    model.to(hw.device, hw.dtype).eval()
    if c.compile:
        model.hidden = torch.compile(model.hidden, dynamic=True)  # type: ignore[method-assign]  # on purpose
    return model


def print_growing(text: Tokenizer, samples: list[list[int]], new_ids: Iterator[Tensor]) -> None:
    """
    Append the new ids (B, 1) of each step to the samples, up to the end of each text. Prints the
    first sample while it grows.
    """
    growing = set(range(len(samples)))
    printed = ""
    for new in new_ids:
        for row, token in enumerate(new[:, 0].tolist()):
            if token == text.eot:
                growing.discard(row)
            elif row in growing:
                samples[row].append(token)
        # without a character whose other bytes may still follow
        whole = text.decode(samples[0]).rstrip("\N{REPLACEMENT CHARACTER}")
        print(printable(whole[len(printed) :]), end="", flush=True)
        printed = max(printed, whole, key=len)
        if not growing:
            break
    print(printable(text.decode(samples[0])[len(printed) :]))


def main(argv: list[str]) -> int:
    c = read_config(argv, SampleConfig)
    raise_if_any(hardware.check_device(c))
    is_typed = "start" not in c.set_keys and sys.stdin.isatty() and sys.stdout.isatty()
    num_samples = 1 if is_typed and "num_samples" not in c.set_keys else c.num_samples
    prompts = ask_prompts() if is_typed else [read_prompt(c.start)]
    # a training config may have auto or scratch
    from_run = c.init_from in ("resume", "auto", "scratch")
    state = read_weights(c.out_dir if from_run else c.init_from, best=from_run)
    text = Tokenizer(state["tokenizer"])
    model = load_model(state, c)
    vocab = state["vocab"]  # before padding
    print_err(f"model: {state['source']}")
    del state  # it maps its file, which on Windows a run could then not replace
    device = model.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(c.seed)
    for prompt in prompts:
        ids = encode(prompt, text)
        window = model.config.block_size
        if len(ids) > window:
            print_err(f"start: {len(ids):,} tokens, but the model sees only the last {window:,}")
        samples = [ids.copy() for _ in range(num_samples)]
        idx = torch.tensor(samples, device=device)
        chosen = (c.temperature, c.top_k, c.top_p, generator)
        new_ids = generate_tokens(model, idx, c.max_new_tokens, vocab, *chosen)
        try:
            print_growing(text, samples, new_ids)
            for sample in samples[1:]:
                print(f"{RULER}\n{printable(text.decode(sample))}")
            print(RULER)
        except KeyboardInterrupt:
            print()
            if not is_typed:
                return 130
    return 0


def explain(error: Exception, argv: list[str]) -> str:
    return "out of memory; fewer --num_samples" if hardware.is_out_of_memory(error) else ""


if __name__ == "__main__":
    run_main(main, explain)
