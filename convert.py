"""
Convert this program's or nanoGPT's weights to Hugging Face: to its GPT-2, or, for the fast model,
to the class in tools/modeling_fast.py, which the export carries.

    python convert.py CKPT DIR

CKPT is a checkpoint, a run's out_dir or nanoGPT's ckpt.pt. DIR, new or empty, can then be opened
with AutoModelForCausalLM and AutoTokenizer. Code in the input files is never executed.
"""

import common.environment  # before torch  # noqa: F401  isort: skip
import json
from pathlib import Path
from typing import Any

import torch

from common.console import Parser, UserError, run_main, say
from data.tokenizer import Tokenizer
from model import GPT
from model_fast import FastConfig, FastGPT, build_model, config_from_dict, config_to_dict
from run.checkpoint import State
from run.pretrained import TRANSPOSED, read_weights

# OpenAI's tokenizer files, from where tiktoken downloads them
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
# The fast model's code. An export contains X.py as nightshift_X.py.
CODE_FILES = ("tools/modeling_fast.py", "model_fast.py", "model.py")
# The largest difference to accept, relative to the largest logit. Rounding in float32 changes
# logits by 1e-6 in trained models and by 7e-6 with ten times larger weights. The exact GELU in
# place of the tanh one changes them by 1e-4.
TOLERANCE = 2e-5


def convert(source: str, folder: Path) -> None:
    """
    Export the model in float32 as a GPT2LMHeadModel, or a fast model together with its code.
    Raises UserError if the folder is not empty, if the weights cannot be read or do not fit their
    config, or if the export would not compute the checkpoint's logits.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; give the name of a new folder")
    import transformers

    state = read_weights(source)
    model = build_model(config_from_dict(state.model_config)).eval()
    state.load_weights(model)
    kind, config = hf_class_and_config(state)
    transformers.utils.logging.set_verbosity_error()  # zeros for absent biases are on purpose
    transformers.utils.logging.disable_progress_bar()
    exported = kind.from_pretrained(None, config=config, state_dict=hf_weights(state)).eval()
    check_logits(model, exported)
    # Without max_length, pipeline() would generate past the end of a short context.
    exported.generation_config.max_length = config.n_positions
    # mlx-lm reads only tied models, under the names in OpenAI's file; transformers 4 refuses those
    # names beside an untied head.
    prefix = "transformer." if config.tie_word_embeddings else ""
    weights = {name.removeprefix(prefix): w for name, w in exported.state_dict().items()}
    exported.save_pretrained(folder, state_dict=weights)
    if isinstance(model, FastGPT):
        write_fast_code(folder)
    write_tokenizer(folder, state.tokenizer, config.n_positions)
    say(f"{folder}: written; docs/sampling.md shows how to load it")


def hf_weights(state: State) -> dict[str, torch.Tensor]:
    """
    Return the weights under Hugging Face's names and in its shapes, and without the vocabulary's
    padding. transformers adds zeros for biases that a GPT-2 lacks.
    """
    is_fast = state.model_config["model"] == "fast"
    weights = {}
    for name, tensor in state.model.items():
        if name.endswith(("wte.weight", "lm_head.weight", "lm_head.bias")):
            tensor = tensor[: state.vocab]
        elif name.endswith(TRANSPOSED) and not is_fast:
            tensor = tensor.mT
        weights[f"model.{name}" if is_fast else name] = tensor
    return weights


@torch.no_grad()
def check_logits(model: GPT | FastGPT, exported: Any) -> None:
    """
    Check that transformers computes the same logits from the export as model.py does from the
    checkpoint. They differ if somebody has changed model.py, because transformers' GPT-2 has not
    changed with it. Raises UserError if they differ.
    """
    hf = exported.config
    generator = torch.Generator().manual_seed(0)
    # use a full context, because a sliding window shows only in texts longer than the window
    idx = torch.randint(hf.vocab_size, (1, hf.n_positions), generator=generator)
    if hf.eos_token_id is not None:  # in case the model attends only within a document
        idx[0, hf.n_positions // 2] = hf.eos_token_id
    logits = model(idx)[..., : hf.vocab_size]
    difference = (exported(idx).logits - logits).abs().max()
    if difference <= TOLERANCE * logits.abs().max():
        return
    code = "tools/modeling_fast.py" if isinstance(model, FastGPT) else "transformers' GPT-2"
    problem = f"the export's logits are off by {difference:.2g}: {code} is a different model"
    raise UserError(f"{problem}; share the checkpoint and its model file instead")


def hf_class_and_config(state: State) -> tuple[Any, Any]:
    """Return transformers' class and config."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from tools import modeling_fast

    config = config_from_dict(state.model_config)
    spec = state.tokenizer
    eot = None if spec["kind"] == "unknown" else Tokenizer(spec).eot
    values: dict[str, Any] = dict(
        dtype="float32",
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        n_positions=config.block_size,
        vocab_size=state.vocab,
        tie_word_embeddings=config.tie_weights,
        bos_token_id=eot,
        eos_token_id=eot,
        # Without this key, AutoTokenizer opens an empty GPT-2 tokenizer if we write no tokenizer.
        tokenizer_class="PreTrainedTokenizerFast",
    )
    if isinstance(config, FastConfig):
        values |= dict(
            architectures=["FastForCausalLM"],
            auto_map={
                "AutoConfig": "nightshift_modeling_fast.FastConfig",
                "AutoModelForCausalLM": "nightshift_modeling_fast.FastForCausalLM",
            },
            model_config=config_to_dict(config),
        )
        return modeling_fast.FastForCausalLM, modeling_fast.FastConfig(**values)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    # llama.cpp reads n_ctx instead of n_positions
    values |= dict(architectures=["GPT2LMHeadModel"], n_ctx=config.block_size, **drop)
    return GPT2LMHeadModel, GPT2Config(**values)


def write_fast_code(folder: Path) -> None:
    """Write a fast model's modelling file and the files it imports."""
    for name in CODE_FILES:
        code = (Path(__file__).parent / name).read_text("utf-8")
        code = code.replace("\nfrom model", "\nfrom .nightshift_model")
        (folder / f"nightshift_{Path(name).name}").write_text(code, encoding="utf-8")


def write_tokenizer(folder: Path, spec: dict, block_size: int) -> None:
    """
    Write a bpe or gpt2 tokenizer for AutoTokenizer. The tokenizer adds no special tokens to a text.
    GPT-2's tokenizer is built from files that tiktoken caches or downloads.
    """
    if spec["kind"] == "bpe":
        own = Tokenizer(spec)
        bpe, end = own.bpe, own.decode([own.eot])
    elif spec["kind"] == "gpt2":
        bpe, end = gpt2_bpe(), "<|endoftext|>"
    else:
        say(f"tokenizer: no files written; Hugging Face has no class for its kind, {spec['kind']}")
        return
    bpe.post_processor = None  # it may add special tokens, which training does not do
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        # save_pretrained() would name a class that transformers 4 does not have
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        # leaves out token_type_ids, whose embeddings GPT-2 would add
        "model_input_names": ["input_ids", "attention_mask"],
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), end),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def gpt2_bpe() -> Any:
    """Return GPT-2's tokenizer for the tokenizers library."""
    from tiktoken.load import read_file_cached
    from tokenizers import ByteLevelBPETokenizer

    vocab = json.loads(read_file_cached(GPT2_FILES + "encoder.json"))
    merges = read_file_cached(GPT2_FILES + "vocab.bpe").decode().splitlines()
    bpe = ByteLevelBPETokenizer(vocab, [tuple(line.split()) for line in merges[1:]])
    bpe.add_special_tokens(["<|endoftext|>"])
    return bpe


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("source", help="a checkpoint, a run's out_dir, or nanoGPT's ckpt.pt")
    parser.add_argument("out", type=Path, help="the folder to write, new or empty")
    args = parser.parse_args(argv)
    convert(args.source, args.out)


if __name__ == "__main__":
    run_main(main)
