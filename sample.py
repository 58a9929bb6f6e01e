"""
Sample from a trained model.

    python sample.py --out_dir=out/gpt124m                 a run: the model of its best evaluation
    python sample.py config/gpt124m_4070.py --start="The"  the run of a training config; a prompt
    python sample.py --init_from=gpt2-xl --num_samples=1   OpenAI's weights
    python sample.py --init_from=out/gpt124m/best.pt       any file or folder that convert.py reads
    python sample.py --help                                every key

Keys are set as for train.py, by config files and --key=value. Training keys in a config file are
ignored. All samples are one batch. A sample ends at an end-of-text token.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from common.console import print_err, printable, raise_if_any, run_main, warn
from common.files import read_text
from configurator import Config, read_config
from data.tokenizer import Tokenizer
from model import GPTConfig, generate
from model_fast import build_model
from training import hardware
from training.pretrained import read_weights

RULER = "---------------"
END_OF_TEXT = "<|endoftext|>"


@dataclass
class SampleConfig:
    init_from: str = "resume"  # resume: the run in out_dir; gpt2 .. gpt2-xl; or a path
    out_dir: str = "out"  # a run's folder, for init_from=resume
    start: str = "\n"  # the prompt, or FILE:name; may hold <|endoftext|>
    num_samples: int = 10  # samples
    max_new_tokens: int = 500  # longest sample, in tokens
    temperature: float = 0.8  # 0: the likeliest token; 1: as the model predicts
    top_k: int = 200  # draw from the k likeliest tokens; 0: from all
    seed: int = 1337  # of the random numbers
    device: str = "auto"  # auto | cuda | cuda:1 | mps | cpu
    dtype: str = "auto"  # of the weights
    compile: bool = False  # torch.compile the model: slower at first
    given: frozenset[str] = field(default=frozenset(), compare=False)  # keys that are set; no key


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


def main(argv: list[str]) -> None:
    c = read_config(argv, SampleConfig)
    raise_if_any(hardware.check_device(c))
    # a training config may have auto or scratch
    from_run = c.init_from in ("resume", "auto", "scratch")
    state = read_weights(c.out_dir if from_run else c.init_from, best=from_run)
    print_err(f"model: {state['source']}")
    text = Tokenizer(state["tokenizer"])
    prompt = c.start
    if prompt.startswith("FILE:"):
        prompt = read_text(Path(prompt.removeprefix("FILE:")).expanduser())

    hw = hardware.set_up(Config(device=c.device, dtype=c.dtype))
    saved = GPTConfig(**state["model_config"])
    model = build_model(replace(saved, flash=hw.flash(saved)))
    model.load_state_dict(state["model"])
    model.to(hw.device, hw.dtype).eval()
    if c.compile:
        model.hidden = torch.compile(model.hidden, dynamic=True)  # type: ignore[method-assign]

    ids = encode(prompt, text)
    idx = torch.tensor([ids] * c.num_samples, device=hw.device)
    generator = torch.Generator(hw.device).manual_seed(c.seed)
    chosen = (c.temperature, c.top_k, generator)
    for sample in generate(model, idx, c.max_new_tokens, state["vocab"], *chosen).tolist():
        new = sample[len(ids) :]
        end = new.index(text.eot) if text.eot in new else len(new)
        print(f"{printable(text.decode(ids + new[:end]))}\n{RULER}")


def explain(error: Exception, argv: list[str]) -> str:
    return "out of memory; fewer --num_samples" if hardware.is_out_of_memory(error) else ""


if __name__ == "__main__":
    run_main(main, explain)
