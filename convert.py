"""
Convert weights: Hugging Face's GPT-2, nanoGPT's checkpoints, and this program's.

    python convert.py hf-to-ckpt DIR OUT.pt         DIR: config.json, model.safetensors; or gpt2-xl
    python convert.py ckpt-to-hf CKPT DIR           for AutoModelForCausalLM and AutoTokenizer; DIR:
                                                    new or empty
    python convert.py nanogpt-to-ckpt IN.pt OUT.pt  nanoGPT's ckpt.pt

CKPT is a checkpoint or the out_dir of a run. train.py and sample.py take a converted file with
--init_from=OUT.pt. No code in the files is ever executed.
"""

import common  # before torch  # noqa: F401  isort: skip
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors

from common.console import Parser, UserError, run_main, say
from common.files import replacing
from data.tokenizer import GPT2_VOCAB, Tokenizer
from model import GPT
from model_fast import FastConfig, FastGPT, build_model, config_from_dict, config_to_dict
from training import checkpoint
from training.pretrained import (
    GPT2_SETTINGS,
    NANOGPTS,
    TRANSPOSED,
    load_pretrained,
    load_weights,
    read_weights,
)

# OpenAI's files, the ones that tiktoken reads
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
# The fast model's code. An exported folder holds X.py as nightshift_X.py.
CODE_FILES = ("training/modeling_fast.py", "model_fast.py", "model.py")
# Of the largest logit. Rounding in float32 is 1e-6 of it in trained models, and 7e-6 where weights
# are ten times as large; the exact GELU in place of the tanh one is 1e-4.
TOLERANCE = 2e-5

# -----------------------------------------------------------------------------
# To Hugging Face


def ckpt_to_hf(source: str, out: str) -> str:
    """
    Export the model in float32, as GPT2LMHeadModel; a fast model with its code. Returns in words
    what the weights were. Raises UserError, also if the export would compute something else than
    the checkpoint's model.
    """
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; give the name of a new folder")
    state = read_weights(source, best=True)
    model = filled_model(state)
    is_fast = isinstance(model, FastGPT)
    weights = fast_weights(state) if is_fast else gpt2_weights(state)
    hf = hf_config(state)
    check_logits(model, weights, hf)
    code = fast_code() if is_fast else {}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as file:
        file.write(to_safetensors(weights, metadata={"format": "pt"}))
    write_json(folder / "config.json", hf)
    # without max_length, pipeline() asks for more tokens than a short context has
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
        say(f"tokenizer: Hugging Face has no class for it ({kind}); no tokenizer files written")
    trust = ", trust_remote_code=True" if is_fast else ""
    say(f"{folder}: written; load it with AutoModelForCausalLM.from_pretrained({out!r}{trust})")
    return state["source"]


def filled_model(state: dict) -> GPT | FastGPT:
    """The model that this program has for these weights. Raises UserError if they do not fit it."""
    model = build_model(config_from_dict(state["model_config"])).eval()
    load_weights(model, state)
    return model


def write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def gpt2_weights(state: dict) -> dict[str, torch.Tensor]:
    """
    The weights with Hugging Face's names and shapes: without padding of the vocabulary, and with
    zeros for biases that the model does not have.
    """
    config = config_from_dict(state["model_config"])
    weights = {}
    for name, tensor in state["model"].items():
        if config.tie_weights:
            if name == "lm_head.weight":
                continue
            # OpenAI's names, without which mlx-lm finds no weight. Beside an untied head,
            # transformers 4 refuses them.
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


def fast_weights(state: dict) -> dict[str, torch.Tensor]:
    """The weights with the modelling file's names, and with padding, which that file cuts off."""
    return {f"model.{name}": copied(tensor) for name, tensor in state["model"].items()}


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, because blocks may share a tensor, and safetensors stores none under two names."""
    return tensor.clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def check_logits(model: GPT | FastGPT, weights: dict[str, torch.Tensor], hf: dict) -> None:
    """
    Raises UserError unless transformers, given the export, computes the logits of the checkpoint's
    own model. People change model.py; transformers' GPT-2 stays as it is.
    """
    try:
        exported = open_export(weights, hf)
    except ImportError:
        say("logits: not checked: pip install transformers (5 or newer)")
        return
    generator = torch.Generator().manual_seed(0)
    # a full context, because a sliding window matters only beyond its length
    idx = torch.randint(hf["vocab_size"], (1, hf["n_positions"]), generator=generator)
    if hf["eos_token_id"] is not None:  # the model may attend only within a document
        idx[0, hf["n_positions"] // 2] = hf["eos_token_id"]
    logits = model(idx)[..., : hf["vocab_size"]]
    difference = (exported(idx).logits - logits).abs().max()
    if difference <= TOLERANCE * logits.abs().max():
        return
    if isinstance(model, FastGPT):
        raise UserError(
            f"logits differ by {difference:.2g}: training/modeling_fast.py calls hidden and logits "
            "of model_fast.py; do there what forward adds"
        )
    raise UserError(
        f"logits differ by {difference:.2g}: model.py computes something else than GPT-2, and "
        "transformers has no class for that; share the checkpoint and model.py (docs/sampling.md)"
    )


def open_export(weights: dict[str, torch.Tensor], hf: dict) -> torch.nn.Module:
    """
    The exported model, as transformers opens it. Raises ImportError without transformers, UserError
    if GPT-2 has other tensors.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()  # tensors that do not fit are named below
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
        *found["mismatched_keys"],  # each with the two shapes
    ]
    if strange:
        raise UserError(
            f"{len(strange)} tensors are not GPT-2's: {strange[0]}; transformers has no class for "
            "that; share the checkpoint and model.py (docs/sampling.md)"
        )
    return exported.eval()


def hf_config(state: dict) -> dict:
    """config.json. The key tokenizer_spec is this program's, for hf-to-ckpt."""
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
        # without tokenizer files AutoTokenizer must fail, instead of opening an empty GPT-2 one
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
        "n_ctx": config.block_size,  # llama.cpp and mlx-lm read it in place of n_positions
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }
    return hf | gpt2 | {key: allowed[0] for key, allowed in GPT2_SETTINGS.items()}


def end_of_text(tokenizer: dict) -> int | None:
    if tokenizer["kind"] == "gpt2":
        return GPT2_VOCAB - 1  # Tokenizer would need the network for its vocabulary
    if tokenizer["kind"] == "unknown":
        return None
    return Tokenizer(tokenizer).eot


def fast_code() -> dict[str, str]:
    """
    The modelling file of a fast model and the files it imports, by name. Raises UserError if they
    import more of this program.
    """
    root = Path(__file__).parent
    files = {}
    for name in CODE_FILES:
        code = (root / name).read_text("utf-8").replace("\nfrom model", "\nfrom .nightshift_model")
        for module in re.findall(r"^ *(?:from|import) (\w+)[\w.]*(?: |,|$)", code, re.MULTILINE):
            if (root / module).is_dir() or (root / f"{module}.py").is_file():
                hint = "put what it needs into model_fast.py"
                raise UserError(f"{name}: imports {module}, which is not exported; {hint}")
        files[f"nightshift_{Path(name).name}"] = code
    return files


def write_tokenizer(folder: Path, tokenizer: dict, block_size: int) -> None:
    """
    Write a bpe or gpt2 tokenizer for AutoTokenizer that adds no tokens by itself. GPT-2's is made
    from the files that tiktoken has or downloads; without them none is written.
    """
    tokenizer_class = "PreTrainedTokenizerFast"
    if tokenizer["kind"] == "bpe":
        own = Tokenizer(tokenizer)
        end = own.decode([own.eot])
        content = json.loads(tokenizer["json"])
        # without settings that go beyond encoding, which training does not apply
        content |= {"post_processor": None, "truncation": None, "padding": None}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    elif write_gpt2_tokenizer(folder):
        end = "<|endoftext|>"
        tokenizer_class = "GPT2Tokenizer"
    else:
        say("tokenizer: cannot get GPT-2's files; AutoTokenizer.from_pretrained('gpt2') can")
        return
    settings = {
        "tokenizer_class": tokenizer_class,
        "model_max_length": block_size,
        # without token_type_ids, which GPT-2 would add as embeddings
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_gpt2_tokenizer(folder: Path) -> bool:
    """GPT-2's two files, and the one that most programs read. False if they are out of reach."""
    import tokenizers
    from tiktoken.load import read_file_cached

    try:
        vocab = read_file_cached(GPT2_FILES + "encoder.json")
        merges = read_file_cached(GPT2_FILES + "vocab.bpe")
    except Exception:  # whatever the network throws
        return False
    (folder / "vocab.json").write_bytes(vocab)
    (folder / "merges.txt").write_bytes(merges)
    model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>"])
    bpe.save(str(folder / "tokenizer.json"))
    return True


# -----------------------------------------------------------------------------
# To a checkpoint


def to_ckpt(source: str, out: str) -> str:
    """
    Write weights as a checkpoint, without a run to resume. Returns in words what they were. Raises
    UserError.
    """
    path = Path(out)
    if path.exists():
        raise UserError(f"{path}: exists; choose another name")
    state = load_pretrained(source)
    filled_model(state)  # weights that do not fit would fail in train.py only
    checkpoint.save(state, path)
    say(f"{path}: written; train or sample from it with --init_from={path}")
    return state["source"]


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("mode", choices=("hf-to-ckpt", "ckpt-to-hf", "nanogpt-to-ckpt"))
    parser.add_argument("source")
    parser.add_argument("out")
    args = parser.parse_args(argv)
    convert = ckpt_to_hf if args.mode == "ckpt-to-hf" else to_ckpt
    if NANOGPTS in convert(args.source, args.out):
        say("note: nanoGPT's GELU is the exact one, not GPT-2's: logits differ by up to 1e-3")


if __name__ == "__main__":
    run_main(main)
