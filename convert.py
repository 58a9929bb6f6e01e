"""
Convert this program's or nanoGPT's weights to Hugging Face's GPT-2.

    python convert.py ckpt-to-hf CKPT DIR

CKPT is a checkpoint, a run's out_dir or nanoGPT's ckpt.pt. DIR, new or empty, can then be opened
with AutoModelForCausalLM and AutoTokenizer. Nothing needs converting in the other direction: give
train.py or sample.py --init_from=PATH. Code in the input files is never executed.
"""

import common.environment  # before torch  # noqa: F401  isort: skip
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors

from common.console import COMMAND, Parser, UserError, run_main, say
from common.files import replacing
from data.tokenizer import GPT2_VOCAB, Tokenizer
from model import GPT
from model_fast import FastConfig, FastGPT, build_model, config_from_dict, config_to_dict
from training.pretrained import TRANSPOSED, load_weights, read_weights

# OpenAI's tokenizer files, from where tiktoken downloads them
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
# The fast model's code. An export contains X.py as nightshift_X.py.
CODE_FILES = ("training/modeling_fast.py", "model_fast.py", "model.py")
# The largest difference to accept, relative to the largest logit. Rounding in float32 changes
# logits by 1e-6 in trained models and by 7e-6 with ten times larger weights. The exact GELU in
# place of the tanh one changes them by 1e-4.
TOLERANCE = 2e-5

# -----------------------------------------------------------------------------
# To Hugging Face


def ckpt_to_hf(source: str, out: str) -> None:
    """
    Export the model in float32 as a GPT2LMHeadModel, or a fast model together with its code.
    Raises UserError if the folder is not empty, if transformers 5 is missing, if the weights cannot
    be read or do not fit their config, or if the export would not compute the checkpoint's logits.
    """
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; give the name of a new folder")
    try:
        import transformers

        from training import modeling_fast  # noqa: F401  needs names that transformers 4 lacks
    except ImportError:
        problem = "an export needs transformers 5; install it with"
        raise UserError(f"{problem}{COMMAND}pip install 'transformers>=5'") from None
    transformers.utils.logging.set_verbosity_error()  # open_export() reports what does not fit
    transformers.utils.logging.disable_progress_bar()
    state = read_weights(source, best=True)
    model = build_model(config_from_dict(state["model_config"])).eval()
    load_weights(model, state)
    exported = open_export(state)
    check_logits(model, exported)
    config = exported.config
    code = fast_code() if isinstance(model, FastGPT) else {}
    folder.mkdir(parents=True, exist_ok=True)
    # A tied GPT-2 gets OpenAI's names, without "transformer.", because mlx-lm finds no others.
    named = exported.base_model if config.tie_word_embeddings else exported
    # safetensors refuses to store a tensor that two blocks share
    weights = {name: copied(tensor) for name, tensor in named.state_dict().items()}
    with replacing(folder / "model.safetensors") as file:
        file.write(to_safetensors(weights, metadata={"format": "pt"}))
    config.save_pretrained(folder)
    # Without max_length, pipeline() would generate past the end of a short context.
    exported.generation_config.max_length = config.n_positions
    exported.generation_config.save_pretrained(folder)
    for name, text in code.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_tokenizer(folder, state["tokenizer"], config.n_positions)
    trust = ", trust_remote_code=True" if code else ""
    say(f"{folder}: written; load it with AutoModelForCausalLM.from_pretrained({out!r}{trust})")


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def hf_weights(state: dict) -> dict[str, torch.Tensor]:
    """
    Return the weights under Hugging Face's names and in its shapes, and without the vocabulary's
    padding. transformers adds zeros for biases that a GPT-2 lacks.
    """
    is_fast = state["model_config"]["model"] == "fast"
    weights = {}
    for name, tensor in state["model"].items():
        if name.endswith(("wte.weight", "lm_head.weight", "lm_head.bias")):
            tensor = tensor[: state["vocab"]]
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
    code = "training/modeling_fast.py" if isinstance(model, FastGPT) else "transformers' GPT-2"
    problem = f"the export's logits are off by {difference:.2g}: {code} is a different model"
    raise UserError(f"{problem}; share the checkpoint and its model file instead")


def open_export(state: dict) -> Any:
    """
    Open the weights with transformers. Raises UserError if the model's tensors differ from
    the ones in transformers' class.
    """
    kind, config = hf_class_and_config(state)
    exported, found = kind.from_pretrained(
        None,
        config=config,
        state_dict=hf_weights(state),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    has_bias = state["model_config"]["bias"]
    strange = [
        *found["unexpected_keys"],
        *(name for name in found["missing_keys"] if has_bias or not name.endswith(".bias")),
        *(name for name, *_ in found["mismatched_keys"]),  # followed by the two shapes
    ]
    if strange:
        raise UserError(
            f"transformers cannot load this model: {strange[0]} is not a tensor of GPT-2; "
            "share the checkpoint and model.py instead (docs/sampling.md)"
        )
    return exported.eval()


def hf_class_and_config(state: dict) -> tuple[Any, Any]:
    """
    Return transformers' class and config. The key tokenizer_spec is our own and lets --init_from
    read the export.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    from training import modeling_fast

    config = config_from_dict(state["model_config"])
    eot = end_of_text(state["tokenizer"])
    values: dict[str, Any] = dict(
        dtype="float32",
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        n_positions=config.block_size,
        vocab_size=state["vocab"],
        tie_word_embeddings=config.tie_weights,
        bos_token_id=eot,
        eos_token_id=eot,
        # Without this key, AutoTokenizer opens an empty GPT-2 tokenizer if we write no tokenizer.
        tokenizer_class="PreTrainedTokenizerFast",
        tokenizer_spec=state["tokenizer"],
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
    # llama.cpp and mlx-lm read n_ctx instead of n_positions
    values |= dict(architectures=["GPT2LMHeadModel"], n_ctx=config.block_size, **drop)
    return GPT2LMHeadModel, GPT2Config(**values)


def end_of_text(tokenizer: dict) -> int | None:
    if tokenizer["kind"] == "gpt2":
        return GPT2_VOCAB - 1  # a Tokenizer would download GPT-2's vocabulary to find out
    if tokenizer["kind"] == "unknown":
        return None
    return Tokenizer(tokenizer).eot


def fast_code() -> dict[str, str]:
    """
    Return the text of a fast model's modelling file and of the files it imports, by file name.
    Raises UserError if they import other modules of this program.
    """
    root = Path(__file__).parent
    files = {}
    for name in CODE_FILES:
        code = (root / name).read_text("utf-8").replace("\nfrom model", "\nfrom .nightshift_model")
        for module in re.findall(r"^ *(?:from|import) (\w+)[\w.]*(?: |,|$)", code, re.MULTILINE):
            if (root / module).is_dir() or (root / f"{module}.py").is_file():
                hint = "move what you need into model_fast.py"
                raise UserError(f"{name}: imports {module}, which is not exported; {hint}")
        files[f"nightshift_{Path(name).name}"] = code
    return files


def write_tokenizer(folder: Path, spec: dict, block_size: int) -> None:
    """
    Write a bpe or gpt2 tokenizer for AutoTokenizer. The tokenizer adds no special tokens to a text.
    GPT-2's tokenizer is built from files that tiktoken caches or downloads; if they are out of
    reach, nothing is written.
    """
    if spec["kind"] == "bpe":
        own = Tokenizer(spec)
        bpe, end = own.bpe, own.decode([own.eot])
    elif spec["kind"] == "gpt2":
        bpe, end = gpt2_bpe(), "<|endoftext|>"
    else:
        say(f"tokenizer: no files written; Hugging Face has no class for its kind, {spec['kind']}")
        return
    if bpe is None:
        say("tokenizer: cannot get GPT-2's files; use AutoTokenizer.from_pretrained('gpt2')")
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
    """Return GPT-2's tokenizer for the tokenizers library, or None if its files are unreachable."""
    from tiktoken.load import read_file_cached
    from tokenizers import ByteLevelBPETokenizer

    try:
        vocab = json.loads(read_file_cached(GPT2_FILES + "encoder.json"))
        merges = read_file_cached(GPT2_FILES + "vocab.bpe").decode().splitlines()
    except Exception:  # whatever the network throws
        return None
    bpe = ByteLevelBPETokenizer(vocab, [tuple(line.split()) for line in merges[1:]])
    bpe.add_special_tokens(["<|endoftext|>"])
    return bpe


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("mode", choices=("ckpt-to-hf",))
    parser.add_argument("source", help="a checkpoint, a run's out_dir, or nanoGPT's ckpt.pt")
    parser.add_argument("out", help="the folder to write, new or empty")
    args = parser.parse_args(argv)
    ckpt_to_hf(args.source, args.out)


if __name__ == "__main__":
    run_main(main)
