"""
Sample from a trained model.

    python sample.py --out_dir=out/gpt124m                 the newest checkpoint of a run
    python sample.py config/gpt124m_4070.py --start="The"  the run of a training config; a prompt
    python sample.py --init_from=gpt2-xl --num_samples=1   OpenAI's weights
    python sample.py --init_from=out/gpt124m/best.pt       any file or folder that convert.py reads
    python sample.py --help                                every key

Keys are set as for train.py, by config files and --key=value. Training keys in a config file are
ignored. All samples are one batch: the first is printed as it grows, the others after it. A sample
ends at the end of text.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.console import UserError, complain, printable, raise_if_any, run_main, warn
from configurator import DTYPES, Config, key, read_config
from data.tokenizer import Tokenizer
from model import GPT, GPTConfig, Sampling, generate_tokens
from model_fast import FastGPT
from training import hardware
from training.build import build_model
from training.pretrained import read_weights

RULER = "---------------"
END_OF_TEXT = "<|endoftext|>"


@dataclass
class SampleConfig:
    init_from: str = key("resume", "resume: the run in out_dir; gpt2 .. gpt2-xl; or a path")
    out_dir: str = key("out", "a run's folder, for init_from=resume")
    start: str = key("\n", f"the prompt, or FILE:name; may hold {END_OF_TEXT}", free_text=True)
    num_samples: int = key(10, "samples in the batch", low=1, high=2**16)
    max_new_tokens: int = key(500, "longest sample, in tokens", low=1, high=2**40)
    temperature: float = key(0.8, "0: the likeliest token; 1: as the model predicts", low=0.0)
    top_k: int = key(200, "draw from the k likeliest tokens; 0: from all", low=0)
    top_p: float = key(1.0, "draw from the likeliest, up to this sum", low=1e-9, high=1.0)
    seed: int = key(1337, "another seed, other samples", low=0, high=2**63 - 1)
    device: str = key("auto", "auto | cuda | cuda:1 | mps | cpu")
    dtype: str = key("auto", "of the weights", DTYPES)
    compile: bool = key(False, "torch.compile the model: slower at first")
    # Not a key: the names of the keys that a file or flag has set
    given: frozenset[str] = field(default=frozenset(), compare=False)


def read_prompt(start: str) -> str:
    """The prompt, from its file if `start` names one. Raises OSError."""
    if not start.startswith("FILE:"):
        return start
    path = Path(start.removeprefix("FILE:")).expanduser()
    return path.read_text(encoding="utf-8", errors="replace")


def encode(prompt: str, text: Tokenizer) -> list[int]:
    """The prompt's tokens. Raises UserError if there are none."""
    if text.kind == "char":
        unknown = sorted(set(prompt) - set(text.decode(range(text.vocab))))
        if unknown:
            warn(f"start: the model does not know {''.join(unknown)!r}; left out")
    parts = prompt.split(END_OF_TEXT) if text.eot is not None else [prompt]
    ids = [int(token) for token in text.encode(parts[0])]
    for part in parts[1:]:
        ids += [text.eot, *(int(token) for token in text.encode(part))]
    if not ids:
        raise UserError(f"start: {prompt!r} encodes to no token; --start=$'\\n' or any other text")
    return ids


def load_model(state: dict, config: SampleConfig) -> GPT | FastGPT:
    """The model on its device."""
    hw = hardware.set_up(Config(device=config.device, dtype=config.dtype))
    model = build_model(GPTConfig(**state["model_config"]))
    model.load_state_dict(state["model"])
    model.to(hw.device, hw.dtype).eval()
    if config.compile:
        model.next_logits = torch.compile(model.next_logits, dynamic=True)
    return model


def print_growing(
    model: GPT | FastGPT, idx: torch.Tensor, text: Tokenizer, vocab: int, config: SampleConfig
) -> list[list[int]]:
    """
    Continue idx (B, T), printing the first sample as it grows. Returns the ids of all samples,
    from the prompt to their end.
    """
    samples, growing = idx.tolist(), set(range(len(idx)))
    printed = ""
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    generator = torch.Generator(idx.device).manual_seed(config.seed)
    for new in generate_tokens(model, idx, config.max_new_tokens, vocab, sampling, generator):
        for row, token in enumerate(new[:, 0].tolist()):
            if token == text.eot:
                growing.discard(row)
            elif row in growing:
                samples[row].append(token)
        # without the bytes of a character whose other bytes may follow
        whole = text.decode(samples[0]).rstrip("\N{REPLACEMENT CHARACTER}")
        print(printable(whole[len(printed) :]), end="", flush=True)
        printed = max(printed, whole, key=len)
        if not growing:
            break
    print(printable(text.decode(samples[0])[len(printed) :]))
    return samples


def main(argv: list[str]) -> int:
    config, problems = read_config(argv, SampleConfig)
    raise_if_any(problems or hardware.check_device(config))
    prompt = read_prompt(config.start)
    # a training config may say auto or scratch
    from_run = config.init_from in ("resume", "auto", "scratch")
    state = read_weights(config.out_dir if from_run else config.init_from)
    if state["tokenizer"]["kind"] == "unknown":
        raise UserError("init_from: the model's tokenizer is not known, so it cannot print text")
    text, vocab = Tokenizer(state["tokenizer"]), state["vocab"]
    ids = encode(prompt, text)
    model = load_model(state, config)
    complain(f"model: {state['source']}")
    window = model.config.block_size
    if len(ids) > window:
        complain(f"start: {len(ids):,} tokens, but the model sees only the last {window:,}")
    idx = torch.tensor([ids] * config.num_samples, device=model.lm_head.weight.device)
    try:
        with hardware.on_out_of_memory(lambda: "out of memory; fewer --num_samples"):
            samples = print_growing(model, idx, text, vocab, config)
    except KeyboardInterrupt:
        print()
        return 130
    for sample in samples[1:]:
        print(f"{RULER}\n{printable(text.decode(sample))}")
    print(RULER)
    return 0


if __name__ == "__main__":
    run_main(main)
