"""
Sample from a trained model.

    python sample.py --out_dir=out/gpt124m                             ten samples from a run's newest checkpoint
    python sample.py --out_dir=out/gpt124m --start="The moon is"       go on from a prompt; FILE:prompt.txt reads it
    python sample.py --init_from=gpt2-xl --num_samples=1               OpenAI's weights
    python sample.py --init_from=out/gpt124m/best.pt --temperature=0   any file or folder that convert.py reads; greedy

All samples are one batch; the first is printed as it comes, the others after it. A sample stops at
the end of text.
"""

import argparse
import math
import os
import sys
from pathlib import Path

import torch

from common.console import Parser, RunError, UserError, run_main, warn
from configurator import BOOLEANS, DTYPES, Config
from data.tokenizer import Tokenizer
from model import GPT, GPTConfig, generate_stream
from model_fast import FastGPT
from training import hardware
from training.build import build_model
from training.pretrained import read_weights

RULER = "---------------"
END_OF_TEXT = "<|endoftext|>"
USUAL_TOP_K = 200


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description="Sample from a trained model.")
    flag = parser.add_argument
    flag(
        "--init_from",
        default="resume",
        help="resume: the run in out_dir; gpt2 .. gpt2-xl; or a checkpoint or folder",
    )
    flag("--out_dir", default="out", help="a run's folder, for init_from=resume")
    flag(
        "--start",
        default="\n",
        help=f"the prompt; may hold {END_OF_TEXT}; FILE:prompt.txt reads it from a file",
    )
    flag("--num_samples", type=int, default=10, help="samples in the batch")
    flag("--max_new_tokens", type=int, default=500, help="longest sample, in tokens")
    flag(
        "--temperature",
        type=float,
        default=0.8,
        help="0: always the likeliest token; 1: as the model predicts",
    )
    flag(
        "--top_k",
        type=int,
        help=f"draw from the k likeliest tokens; 0: from all (default: {USUAL_TOP_K})",
    )
    flag(
        "--top_p",
        type=float,
        default=1.0,
        help="draw from the fewest tokens that have this probability together",
    )
    flag("--seed", type=int, default=1337)
    flag("--device", default="auto", help="auto | cuda | cuda:1 | mps | cpu")
    flag("--dtype", default="auto", choices=DTYPES, help="of the weights")
    flag(
        "--compile",
        default="false",
        nargs="?",
        const="true",
        help="torch.compile the model: slower at first",
    )
    args = parser.parse_args(argv)
    args.compile = BOOLEANS.get(args.compile.lower())
    return args


def find_problems(args: argparse.Namespace) -> list[str]:
    problems = [
        f"{name}: {getattr(args, name)} is outside {low} to {high}; --{name}={default}"
        for name, low, high, default in (
            ("num_samples", 1, 2**16, 1),
            ("max_new_tokens", 1, 2**40, 500),
            ("temperature", 0, math.inf, 0.8),
            ("top_k", 0, math.inf, USUAL_TOP_K),
            ("seed", 0, 2**63 - 1, 1337),
        )
        if getattr(args, name) is not None and not low <= getattr(args, name) <= high
    ]
    if not 0 < args.top_p <= 1:
        problems.append(f"top_p: {args.top_p} is no probability above 0; --top_p=0.95")
    if args.compile is None:
        problems.append("compile: needs true or false")
    return problems + hardware.check_device(Config(device=args.device))


def read_prompt(start: str) -> str:
    if not start.startswith("FILE:"):
        return start.encode(
            errors="replace"
        ).decode()  # a command line may hold bytes that are no text
    try:
        return Path(os.path.expanduser(start.removeprefix("FILE:"))).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"start: {start.removeprefix('FILE:')} cannot be read as text ({error}); give another file"
        ) from None


def encode(prompt: str, text: Tokenizer, vocab: int) -> list[int]:
    """The prompt's tokens. Raises UserError where there are none, or one that the model has not."""
    if text.kind == "char" and (
        unknown := sorted(set(prompt) - set(text.decode(range(text.vocab))))
    ):
        warn(f"start: the model has no {''.join(unknown)!r}; left out")
    ids = []
    for i, part in enumerate(prompt.split(END_OF_TEXT) if text.eot is not None else [prompt]):
        ids += [text.eot] * (i > 0) + [int(token) for token in text.encode(part)]
    if not ids:
        raise UserError(f"start: {prompt!r} encodes to no token; --start=$'\\n' or any other text")
    if max(ids) >= vocab:
        raise UserError(
            f"start: {prompt!r} holds token {max(ids)}; the model's vocabulary is {vocab}; use other words"
        )
    return ids


def stream_samples(
    model: GPT | FastGPT, idx: torch.Tensor, text: Tokenizer, vocab: int, args: argparse.Namespace
) -> list[list[int]]:
    """
    Print the first sample while the batch grows; returns all samples' ids, the prompt's included,
    up to their end.
    """
    samples, growing = idx.tolist(), set(range(len(idx)))
    printed = ""
    generator = torch.Generator(idx.device).manual_seed(args.seed)
    for new in generate_stream(
        model, idx, args.max_new_tokens, vocab, args.temperature, args.top_k, generator, args.top_p
    ):
        for row, token in enumerate(new[:, 0].tolist()):
            if token == text.eot:
                growing.discard(row)
            elif row in growing:
                samples[row].append(token)
        whole = text.decode(samples[0]).rstrip(
            "\N{REPLACEMENT CHARACTER}"
        )  # the rest of a character may follow
        print(whole[len(printed) :], end="", flush=True)
        printed = max(printed, whole, key=len)
        if not growing:
            break
    print(text.decode(samples[0])[len(printed) :])
    return samples


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    if problems := find_problems(args):
        raise UserError(*problems)
    prompt = read_prompt(args.start)
    state = read_weights(args.out_dir if args.init_from == "resume" else args.init_from)
    if state["tokenizer"]["kind"] not in ("gpt2", "byte", "char"):
        raise UserError(
            "init_from: the model's tokenizer is not known, so its tokens cannot be read as text"
        )
    text, vocab = Tokenizer(state["tokenizer"]), state["vocab"]
    ids = encode(prompt, text, vocab)
    if args.top_k is None:
        args.top_k = min(USUAL_TOP_K, vocab)
    elif args.top_k > vocab:
        raise UserError(
            f"top_k: {args.top_k} is more than the vocabulary of {vocab}; --top_k=0 draws from all of it"
        )
    hw = hardware.set_up(Config(device=args.device, dtype=args.dtype))
    model = build_model(GPTConfig(**state["model_config"]))
    model.load_state_dict(state["model"])
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise UserError(
            "init_from: its weights are not finite, the run has diverged; give an older checkpoint"
        )
    model.to(hw.device, hw.dtype).eval()
    if args.compile:
        model.next_logits = torch.compile(model.next_logits, dynamic=True)
    if len(ids) > model.config.block_size:
        print(
            f"start: {len(ids):,} tokens, of which the model sees the last {model.config.block_size:,}",
            file=sys.stderr,
        )
    idx = torch.tensor([ids] * args.num_samples, device=hw.device)
    try:
        samples = stream_samples(model, idx, text, vocab, args)
    except KeyboardInterrupt:
        print()
        return 130
    except (RuntimeError, MemoryError) as error:
        if not hardware.is_out_of_memory(error):
            raise
        raise RunError("out of memory; fewer --num_samples") from None
    for sample in samples[1:]:
        print(f"{RULER}\n{text.decode(sample)}")
    print(RULER)
    return 0


if __name__ == "__main__":
    run_main(main)
