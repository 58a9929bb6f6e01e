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
from training.pretrained import GPT2_SETTINGS, TRANSPOSED, load_weights, read_weights

# OpenAI's tokenizer files, from where tiktoken downloads them
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
# The fast model's code. An export contains X.py as nightshift_X.py.
CODE_FILES = ("training/modeling_fast.py", "model_fast.py", "model.py")
TRANSFORMERS = "pip install 'transformers>=5'"
# Relative to the largest logit. Rounding in float32 changes logits by 1e-6 in trained models and by
# 7e-6 with ten times larger weights. The exact GELU in place of the tanh one changes them by 1e-4.
TOLERANCE = 2e-5

# -----------------------------------------------------------------------------
# To Hugging Face


def ckpt_to_hf(source: str, out: str) -> None:
    """
    Export the model in float32 as a GPT2LMHeadModel, or a fast model together with its code.
    Raises UserError if the folder is not empty, if the weights cannot be read or do not fit their
    config, or if the export would not compute the checkpoint's logits.
    """
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; give the name of a new folder")
    state = read_weights(source, best=True)
    model = build_model(config_from_dict(state["model_config"])).eval()
    load_weights(model, state)
    is_fast = isinstance(model, FastGPT)
    if is_fast:
        # keep the vocabulary's padding; modeling_fast.py cuts off its logits
        weights = {f"model.{name}": copied(tensor) for name, tensor in state["model"].items()}
    else:
        weights = gpt2_weights(state)
    hf = hf_config(state)
    check_logits(model, weights, hf)
    code = fast_code() if is_fast else {}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as file:
        file.write(to_safetensors(weights, metadata={"format": "pt"}))
    write_json(folder / "config.json", hf)
    # Without max_length, pipeline() would generate past the end of a short context.
    generation = {
        "max_length": hf["n_positions"],
        "bos_token_id": hf["bos_token_id"],
        "eos_token_id": hf["eos_token_id"],
    }
    write_json(folder / "generation_config.json", generation)
    for name, text in code.items():
        (folder / name).write_text(text, encoding="utf-8")
    kind = state["tokenizer"]["kind"]
    if kind in ("gpt2", "bpe"):
        write_tokenizer(folder, state["tokenizer"], hf["n_positions"])
    else:
        say(
            f"tokenizer: no tokenizer files written; Hugging Face has no class for its kind, {kind}"
        )
    trust = ", trust_remote_code=True" if is_fast else ""
    say(f"{folder}: written; load it with AutoModelForCausalLM.from_pretrained({out!r}{trust})")


def write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def gpt2_weights(state: dict) -> dict[str, torch.Tensor]:
    """
    Return the weights under Hugging Face's names and in its shapes: without the vocabulary's
    padding, and with zeros for biases that the model lacks.
    """
    config = config_from_dict(state["model_config"])
    weights = {}
    for name, tensor in state["model"].items():
        if config.tie_weights:
            if name == "lm_head.weight":
                continue
            # Use OpenAI's names, because mlx-lm finds no weight under any other. With an untied
            # head transformers 4 refuses them.
            name = name.removeprefix("transformer.")
        if name.endswith(("wte.weight", "lm_head.weight")):
            tensor = tensor[: state["vocab"]]
        elif name.endswith(TRANSPOSED):
            tensor = tensor.mT
        weights[name] = copied(tensor)
        has_bias = name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight", *TRANSPOSED))
        if has_bias and not config.bias:
            weights[name.replace(".weight", ".bias")] = torch.zeros(tensor.shape[-1])
    return weights


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, because safetensors refuses to store one that two blocks share."""
    return tensor.clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def check_logits(model: GPT | FastGPT, weights: dict[str, torch.Tensor], hf: dict) -> None:
    """
    Check that transformers computes the same logits from the export as model.py does from the
    checkpoint. They differ if somebody has changed model.py, because transformers' GPT-2 has not
    changed with it. Raises UserError if they differ.
    """
    try:
        exported = open_export(weights, hf)
    except ImportError:
        problem = "the export is written but not checked, because transformers is missing"
        say(f"{problem}; to check it, install it and convert again{COMMAND}{TRANSFORMERS}")
        return
    generator = torch.Generator().manual_seed(0)
    # use a full context, because a sliding window shows only in texts longer than the window
    idx = torch.randint(hf["vocab_size"], (1, hf["n_positions"]), generator=generator)
    if hf["eos_token_id"] is not None:  # in case the model attends only within a document
        idx[0, hf["n_positions"] // 2] = hf["eos_token_id"]
    logits = model(idx)[..., : hf["vocab_size"]]
    difference = (exported(idx).logits - logits).abs().max()
    if difference <= TOLERANCE * logits.abs().max():
        return
    code = "training/modeling_fast.py" if isinstance(model, FastGPT) else "transformers' GPT-2"
    problem = f"logits differ by {difference:.2g}: {code} does not compute this model"
    raise UserError(f"{problem}; share the checkpoint and its model file instead")


def open_export(weights: dict[str, torch.Tensor], hf: dict) -> torch.nn.Module:
    """
    Open the exported weights with transformers. Raises ImportError without transformers, and
    UserError if the model's tensors are not those of transformers' class.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()  # our own error names tensors that do not fit
    transformers.utils.logging.disable_progress_bar()
    kind: Any = transformers.GPT2LMHeadModel
    if hf["model_type"] != "gpt2":
        from training.modeling_fast import FastForCausalLM

        kind = FastForCausalLM
    exported, found = kind.from_pretrained(
        None,
        config=kind.config_class(**hf),
        state_dict=weights,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    strange = [
        *found["unexpected_keys"],
        *found["missing_keys"],
        *(name for name, *_ in found["mismatched_keys"]),  # followed by the two shapes
    ]
    if strange:
        raise UserError(
            f"{len(strange)} tensors are not GPT-2's, such as {strange[0]}, so transformers cannot "
            "load this model; share the checkpoint and model.py instead (docs/sampling.md)"
        )
    return exported.eval()


def hf_config(state: dict) -> dict:
    """Build config.json. Its key tokenizer_spec is our own and lets --init_from read it."""
    config = config_from_dict(state["model_config"])
    eot = end_of_text(state["tokenizer"])
    hf = {
        "dtype": "float32",
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.block_size,
        "vocab_size": state["vocab"],
        "tie_word_embeddings": config.tie_weights,
        "bos_token_id": eot,
        "eos_token_id": eot,
        # Without this key, AutoTokenizer opens an empty GPT-2 tokenizer if we write no tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "tokenizer_spec": state["tokenizer"],
    }
    if isinstance(config, FastConfig):
        return hf | {
            "model_type": "nightshift_fast",
            "architectures": ["FastForCausalLM"],
            "auto_map": {
                "AutoConfig": "nightshift_modeling_fast.FastConfig",
                "AutoModelForCausalLM": "nightshift_modeling_fast.FastForCausalLM",
            },
            "model_config": config_to_dict(config),
        }
    gpt2 = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_ctx": config.block_size,  # llama.cpp and mlx-lm read n_ctx instead of n_positions
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }
    return hf | gpt2 | {key: allowed[0] for key, allowed in GPT2_SETTINGS.items()}


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


def write_tokenizer(folder: Path, tokenizer: dict, block_size: int) -> None:
    """
    Write a bpe or gpt2 tokenizer for AutoTokenizer. The tokenizer adds no special tokens to a text.
    GPT-2's is built from files that tiktoken caches or downloads; if they are out of reach, nothing
    is written.
    """
    tokenizer_class = "PreTrainedTokenizerFast"
    if tokenizer["kind"] == "bpe":
        own = Tokenizer(tokenizer)
        end = own.decode([own.eot])
        content = json.loads(tokenizer["json"])
        # remove settings that add or cut tokens, because training does not apply them
        content |= {"post_processor": None, "truncation": None, "padding": None}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    elif write_gpt2_tokenizer(folder):
        end = "<|endoftext|>"
        tokenizer_class = "GPT2Tokenizer"
    else:
        say("tokenizer: cannot get GPT-2's files; use AutoTokenizer.from_pretrained('gpt2')")
        return
    settings = {
        "tokenizer_class": tokenizer_class,
        "model_max_length": block_size,
        # leaves out token_type_ids, whose embeddings GPT-2 would add
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_gpt2_tokenizer(folder: Path) -> bool:
    """
    Write vocab.json and merges.txt, and tokenizer.json, which most programs read instead. Returns
    False if OpenAI's files are out of reach.
    """
    from tiktoken.load import read_file_cached
    from tokenizers import ByteLevelBPETokenizer

    try:
        vocab = read_file_cached(GPT2_FILES + "encoder.json")
        merges = read_file_cached(GPT2_FILES + "vocab.bpe")
    except Exception:  # whatever the network throws
        return False
    (folder / "vocab.json").write_bytes(vocab)
    (folder / "merges.txt").write_bytes(merges)
    bpe = ByteLevelBPETokenizer.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    bpe.add_special_tokens(["<|endoftext|>"])
    bpe.save(str(folder / "tokenizer.json"))
    return True


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("mode", choices=("ckpt-to-hf",))
    parser.add_argument("source", help="a checkpoint, a run's out_dir, or nanoGPT's ckpt.pt")
    parser.add_argument("out", help="the folder to write, new or empty")
    args = parser.parse_args(argv)
    ckpt_to_hf(args.source, args.out)


if __name__ == "__main__":
    run_main(main)
