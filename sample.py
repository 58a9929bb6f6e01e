"""
Sample from a trained model.

    python sample.py --out_dir=out/gpt124m                 a run's model with the best val loss
    python sample.py config/gpt124m_4070.py --start="The"  the run of this config, with a prompt
    python sample.py --init_from=gpt2-xl --num_samples=1   OpenAI's weights, or a hub model's
    python sample.py --init_from=out/gpt124m/ckpt-00019073.pt    any checkpoint
    python sample.py --help                                list all keys

Keys are set as for train.py, in config files and by --key=value. In a config file, keys of train.py
alone are ignored. All samples are one batch, printed when they are done. A sample ends at an
end-of-text token. The default prompt is a newline, as in nanoGPT.
"""

import common.environment  # before torch  # noqa: F401  isort: skip
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.console import run_main, say
from common.files import read_text
from configurator import NOT_WEIGHTS, Config, Dtype, Location, Positive, UpToOne, read_config
from data.tokenizer import Tokenizer
from machine import hardware
from model import generate
from model_fast import build_model, config_from_dict
from run.pretrained import load_pretrained, read_weights

RULER = "---------------"
END_OF_TEXT = "<|endoftext|>"


@dataclass
class SampleConfig:
    """
    Print samples from a trained model.

        python sample.py --out_dir=out/quickstart
        python sample.py --init_from=gpt2 --start="Once upon a time"
    """

    # Keys
    init_from: Location = "resume"  # resume: out_dir's run; gpt2 .. gpt2-xl; OWNER/NAME; a path
    out_dir: Location = "out"  # a run's folder, for init_from=resume
    start: str = "\n"  # the prompt, or FILE:name; may contain <|endoftext|>
    num_samples: Positive = 10  # how many samples of the prompt
    max_new_tokens: Positive = 500  # longest sample, in tokens
    temperature: float = 0.8  # 0: always the likeliest token; 1: the model's own probabilities
    top_k: int = 200  # draw from the k likeliest tokens only; 0: from all
    top_p: UpToOne = 1.0  # draw from the likeliest tokens that have this probability; 1: all
    seed: int = 1337  # random seed
    device: str = "auto"  # auto, cuda, cuda:1, mps or cpu
    dtype: Dtype = "auto"  # dtype of the weights; auto: the fastest here
    compile: bool = False  # torch.compile the model, which is slow to start
    # Not a key: the names of the keys that a file or a flag set
    set_keys: frozenset[str] = field(default=frozenset(), compare=False)


def encode(prompt: str, text: Tokenizer) -> list[int]:
    """
    Return the prompt's token ids; for an empty prompt, or one without a character that the model
    knows, the tokenizer's start_ids().
    """
    parts = prompt.split(END_OF_TEXT) if text.eot is not None else [prompt]
    ids = []
    for part in parts:
        ids += [text.eot, *(int(token) for token in text.encode(part))]
    return ids[1:] or text.start_ids()


def main(argv: list[str]) -> int:
    c = read_config(argv, SampleConfig)
    hw = hardware.set_up(Config(device=c.device, dtype=c.dtype))
    prompt = c.start
    if prompt.startswith("FILE:"):
        prompt = read_text(Path(prompt.removeprefix("FILE:")))
    # In a training config, scratch also means the run in out_dir.
    from_run = c.init_from in NOT_WEIGHTS
    state = read_weights(c.out_dir) if from_run else load_pretrained(c.init_from)
    text = Tokenizer(state.tokenizer)
    model = build_model(config_from_dict(state.model_config))
    state.load_weights(model)
    model.to(hw.device, hw.dtype).eval()
    if c.compile:
        model.hidden = torch.compile(model.hidden, dynamic=True)  # type: ignore[method-assign]  # on purpose
    vocab = state.vocab  # before padding
    say(f"model: {state.source}", console="stderr")
    del state  # memory-mapped: on Windows, a run could otherwise not replace its checkpoint
    generator = torch.Generator(hw.device).manual_seed(c.seed)
    ids = encode(prompt, text)
    idx = torch.tensor([ids] * c.num_samples, device=hw.device)
    chosen = (c.temperature, c.top_k, c.top_p, generator)
    for sample in generate(model, idx, c.max_new_tokens, vocab, *chosen).tolist():
        new = sample[len(ids) :]
        end = new.index(text.eot) if text.eot in new else len(new)
        say(text.decode(ids + new[:end]), RULER)
    return 0


if __name__ == "__main__":
    run_main(main, "reduce --num_samples")
