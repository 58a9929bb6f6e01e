"""
Reads weights trained elsewhere: Hugging Face's GPT-2, nanoGPT's checkpoints, and this program's.

No code in these files is ever executed.
"""

import os
from dataclasses import replace
from pathlib import Path

from common.console import UserError, did_you_mean
from common.files import read_json
from data.shards import dataset_folder
from data.tokenizer import GPT2_VOCAB, read_meta
from model import GPTConfig
from model_fast import FastConfig, config_from_dict, config_to_dict
from training import checkpoint

HUB_SIZES: dict[str, dict] = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),
}
HUB_NAMES = tuple(HUB_SIZES)
# Hugging Face keeps these matrices as (in, out), the transpose of nn.Linear's
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# The sizes in config.json, with GPT-2's values, which transformers uses for any left out
GPT2_SIZES = dict(vocab_size=50257, n_positions=1024, n_layer=12, n_head=12, n_embd=768)
# The other settings, each with the values that model.py can compute, GPT-2's first
GPT2_SETTINGS = dict(
    activation_function=("gelu_new", "gelu_pytorch_tanh"),
    layer_norm_epsilon=(1e-5,),
    scale_attn_weights=(True,),
    scale_attn_by_inverse_layer_idx=(False,),
)
NO_TOKENIZER = dict(kind="unknown")
NANOGPTS = " of nanoGPT"  # in the source of weights trained by nanoGPT


def load_pretrained(name_or_path: str, block_size: int | None = None) -> dict:
    """
    The weights that init_from names: gpt2, gpt2-medium, gpt2-large or gpt2-xl from the hub, a
    Hugging Face folder, a checkpoint of this program or of nanoGPT, or a run's out_dir.

    Returns `model` (float32 weights by model.py's names), `model_config`, `vocab` (the size of the
    vocabulary before padding), `tokenizer`, and in words the `source`. A context longer than
    `block_size` is cropped to it. The vocabulary is not padded further, because new rows would take
    part in every softmax. Raises UserError.
    """
    state = read_weights(name_or_path)
    config = config_from_dict(state["model_config"])
    weights = state["model"]
    if block_size is not None and block_size < config.block_size:
        if not isinstance(config, FastConfig):  # which has no position embeddings
            wpe = weights["transformer.wpe.weight"][:block_size].clone()
            weights = weights | {"transformer.wpe.weight": wpe}
        config = replace(config, block_size=block_size)
    known = {name: state[name] for name in ("vocab", "tokenizer", "source")}
    return dict(known, model=weights, model_config=config_to_dict(config))


def read_sizes(name_or_path: str, block_size: int | None = None) -> dict:
    """Return the `model_config` of load_pretrained(), without fetching OpenAI's weights."""
    path = Path(name_or_path)
    if name_or_path not in HUB_SIZES or path.exists():
        return load_pretrained(name_or_path, block_size)["model_config"]
    config = read_hf_config(dict(HUB_SIZES[name_or_path], model_type="gpt2"), path)
    return config_to_dict(replace(config, block_size=min(block_size or 1024, config.block_size)))


def load_weights(model, state: dict) -> None:
    """Fill the model. Raises UserError if the weights do not fit it, or are not finite."""
    source = state.get("source", "the checkpoint")
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: list(tensor.shape) for name, tensor in state["model"].items()}
    for name in wanted | given:
        found = given.get(name, "missing")
        asked = wanted.get(name, "none")
        if found != asked:
            raise UserError(
                f"{source}: {name} is {found}, in the model of its config {asked}; "
                "it needs the config and the model.py that it was trained with"
            )
    model.load_state_dict(state["model"])
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"{source}: {name} is not finite; give an older checkpoint")


# -----------------------------------------------------------------------------
# Which file


def find_weights(name_or_path: str, best: bool = False) -> Path:
    """
    The file that a name or path means: for a run its newest checkpoint, or with `best` its best.pt;
    for a Hugging Face model its folder. Raises UserError.
    """
    path = Path(os.path.expanduser(name_or_path))  # shells do not expand the ~ in --init_from=~/x
    if name_or_path in HUB_NAMES and not path.exists():
        return fetch(name_or_path)
    if path.is_file():
        return path
    if best and (path / "best.pt").is_file():
        return path / "best.pt"
    if files := checkpoint.list_checkpoints(path):  # first: a run may have an export inside
        return files[-1]
    if (path / "config.json").is_file():
        return path
    if (path / "ckpt.pt").is_file():
        return path / "ckpt.pt"
    what = "no checkpoint or config.json in it" if path.is_dir() else "no such file or folder"
    hint = "give a checkpoint, an out_dir, a Hugging Face folder or gpt2"
    meant = did_you_mean(str(path), ("scratch", "resume", "auto", *HUB_NAMES))
    raise UserError(f"{path}: {what}{meant}; {hint}")


def fetch(name: str) -> Path:
    """The folder of one of OpenAI's models, downloaded from the hub unless it is here already."""
    try:
        from huggingface_hub import hf_hub_download

        hf_hub_download(f"openai-community/{name}", "model.safetensors")
        return Path(hf_hub_download(f"openai-community/{name}", "config.json")).parent
    except Exception as error:  # whatever the network throws
        raise UserError(
            f"{name}: cannot be fetched from the Hugging Face hub ({type(error).__name__}); "
            "go online once, or give its folder"
        ) from None


# -----------------------------------------------------------------------------
# What is in it


def read_weights(name_or_path: str, best: bool = False) -> dict:
    """
    The weights as a checkpoint's state: `model`, `model_config`, `vocab` and `tokenizer`. `source`
    describes in words what was read. Raises UserError.
    """
    path = find_weights(name_or_path, best)
    try:
        state = read_hf(path) if path.is_dir() else read_checkpoint(path)
        if state["tokenizer"]["kind"] == "unknown":
            state["tokenizer"] = find_characters(state, path)
        return state | dict(source=describe_source(state, path))
    except UserError:
        raise
    except Exception as error:  # another program's or version's file may raise anything
        raise UserError(f"{path}: not a model ({type(error).__name__}: {error})") from None


def describe_source(state: dict, path: Path) -> str:
    """out/x/ckpt-00001500.pt, iteration 1,500, val loss 1.4851 (as far as known)"""
    if "source" in state:  # written by convert.py
        return f"{path}, from {state['source']}"
    words = str(path)
    iter_num = state.get("progress", state).get("iter_num")
    if iter_num is not None:
        whose = "" if "progress" in state else NANOGPTS
        words += f"{whose}, iteration {iter_num:,}"
    val_loss = state.get("val_loss")
    if val_loss is not None:
        words += f", val loss {val_loss:.4f}"
    return words


def find_characters(state: dict, path: Path) -> dict:
    """
    The tokenizer of a nanoGPT meta.pkl with as many characters as the model: next to the weights at
    `path`, or in data/NAME of a folder above them or of the current one, NAME being the
    checkpoint's dataset. Of kind unknown if there is none.
    """
    name = state.get("config", {}).get("dataset", "")
    above = [folder / "data" / name for folder in path.resolve().parents]
    for folder in (path, path.parent, *above, dataset_folder(name)):
        if (folder / "meta.pkl").is_file():
            vocab, tokenizer = read_meta(folder / "meta.pkl")
            if vocab == state["vocab"]:
                return tokenizer
    return NO_TOKENIZER


# -----------------------------------------------------------------------------
# Hugging Face


def read_hf(folder: Path) -> dict:
    """A Hugging Face GPT-2: config.json and model.safetensors. Raises UserError."""
    from safetensors.torch import load_file

    hf = read_json(folder / "config.json", hint="get it again")
    config = read_hf_config(hf, folder)
    if not (folder / "model.safetensors").is_file():  # pytorch_model.bin, or several files
        raise UserError(
            f"{folder}: no model.safetensors; transformers makes one: GPT2LMHeadModel."
            f"from_pretrained({str(folder)!r}).save_pretrained('NEW', max_shard_size='50GB')"
        )
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("transformer.")
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # causal masks, which older versions stored
        if name != "lm_head.weight":
            name = f"transformer.{name}"
        tensor = tensor.float()
        weights[name] = tensor.mT.contiguous() if name.endswith(TRANSPOSED) else tensor
    if config.tie_weights and "transformer.wte.weight" in weights:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    vocab, tokenizer = guess_vocabulary(config.vocab_size)
    if "tokenizer_spec" in hf:  # an export of this program
        vocab, tokenizer = config.vocab_size, hf["tokenizer_spec"]
    return dict(
        model=weights, model_config=config_to_dict(config), vocab=vocab, tokenizer=tokenizer
    )


def read_hf_config(hf: dict, folder: Path) -> GPTConfig:
    """The model of a config.json. Raises UserError if model.py cannot compute it."""
    if hf.get("model_type") != "gpt2":
        raise UserError(f"{folder}: its model_type is {hf.get('model_type')!r}, not gpt2")
    for key, allowed in GPT2_SETTINGS.items():
        value = hf.get(key, allowed[0])
        if value not in allowed:
            raise UserError(f"{folder}: {key} is {value!r}; only GPT-2's {allowed[0]!r} will do")
    sizes = {key: hf.get(key, value) for key, value in GPT2_SIZES.items()}
    block_size = sizes.pop("n_positions")
    tie_weights = hf.get("tie_word_embeddings", True)
    return GPTConfig(block_size=block_size, tie_weights=tie_weights, **sizes)


# -----------------------------------------------------------------------------
# Checkpoints


def read_checkpoint(path: Path) -> dict:
    """The state in a checkpoint of this program, or of nanoGPT, in this program's terms."""
    state = checkpoint.load(path)
    if "model_config" in state:
        return state
    if "model_args" not in state:
        raise UserError(f"{path}: a checkpoint of neither this program nor nanoGPT")
    config = GPTConfig(**state["model_args"])
    weights = {}
    for name, tensor in state["model"].items():
        if not name.endswith(".attn.bias"):  # old checkpoints hold the causal masks
            weights[name.removeprefix("_orig_mod.")] = tensor.float()  # a compiled model's prefix
    vocab, tokenizer = guess_vocabulary(config.vocab_size)
    return dict(
        model=weights,
        model_config=config_to_dict(config),
        vocab=vocab,
        tokenizer=tokenizer,
        config=state.get("config", {}),
        iter_num=state.get("iter_num"),
        val_loss=state.get("best_val_loss"),  # nanoGPT saves right after its best evaluation
    )


def guess_vocabulary(vocab_size: int) -> tuple[int, dict]:
    """
    The vocabulary and tokenizer of an embedding of this size: GPT-2's for 50257 rows, or 50304 with
    padding; else all rows, and an unknown tokenizer.
    """
    if vocab_size in (GPT2_VOCAB, 50304):
        return GPT2_VOCAB, dict(kind="gpt2")
    return vocab_size, NO_TOKENIZER
