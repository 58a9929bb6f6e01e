"""
Weights that were trained elsewhere, read: Hugging Face's GPT-2, nanoGPT's checkpoints, and this
program's own.

Nothing in a file that is read here is ever executed.
"""

import os
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from common.console import UserError
from data.shards import dataset_folder, read_json
from data.tokenizer import GPT2_VOCAB, read_meta
from model import GPTConfig
from training import checkpoint
from training.build import build_model

HUB_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
# Hugging Face keeps these matrices as (in, out), the transpose of nn.Linear's
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# config.json's sizes with GPT-2's values, which may be left out there, and what else it may say of
# a model.py model.
GPT2_SIZES = dict(vocab_size=50257, n_positions=1024, n_layer=12, n_head=12, n_embd=768)
GPT2_ONLY = dict(
    n_inner=(None,),
    activation_function=("gelu_new", "gelu_pytorch_tanh"),
    layer_norm_epsilon=(1e-5,),
    scale_attn_weights=(True,),
    scale_attn_by_inverse_layer_idx=(False,),
    add_cross_attention=(False,),
)


def load_pretrained(name_or_path: str, block_size: int | None = None) -> dict:
    """
    What init_from means: gpt2, gpt2-medium, gpt2-large or gpt2-xl from the hub, a Hugging Face
    folder, a checkpoint of this program or of nanoGPT, or a run's out_dir. Returns `model` (float32
    weights under the names of model.py), `model_config`, and `vocab` before padding; cropped to
    `block_size` where that is given. The vocabulary is not padded further: new rows would take part
    in every softmax. Raises UserError.
    """
    state = read_weights(name_or_path)
    config, weights = GPTConfig(**state["model_config"]), state["model"]
    if block_size is not None:
        config, weights = crop_block_size(config, weights, block_size)
    return dict(model=weights, model_config=asdict(config), vocab=state["vocab"])


def read_weights(name_or_path: str) -> dict:
    """
    As load_pretrained, but in a checkpoint's terms: a dict of `model`, `model_config`, `vocab` and
    `tokenizer`.
    """
    path = Path(os.path.expanduser(name_or_path))  # a shell leaves the ~ of --init_from=~/x alone
    if name_or_path in HUB_NAMES and not path.exists():
        path = fetch(name_or_path)
    try:
        state = read_any(path)
        state["vocab"], state["tokenizer"] = check_state(state, path)
    except UserError:
        raise
    except Exception as error:  # a stranger's file may hold anything, under any name
        raise UserError(
            f"{path}: not a model ({type(error).__name__}: {error}); give another"
        ) from None
    return state


def read_any(path: Path) -> dict:
    if path.is_file():
        return read_checkpoint(path)
    if (path / "config.json").is_file():
        return read_hf(path)
    if (path / "ckpt.pt").is_file():
        return read_checkpoint(path / "ckpt.pt")
    if path.is_dir() and (state := checkpoint.load_newest(path)):
        return state
    what = (
        "holds neither config.json nor a checkpoint" if path.is_dir() else "no such file or folder"
    )
    raise UserError(
        f"{path}: {what}; give one of {', '.join(HUB_NAMES)}, a Hugging Face folder, a checkpoint or an out_dir"
    )


def check_state(state: dict, path: Path) -> tuple[int, dict]:
    """
    Raise UserError where the weights are not those that model_config asks for; returns vocabulary
    and tokenizer.
    """
    config, weights, vocab, tokenizer = (
        GPTConfig(**state["model_config"]),
        state["model"],
        state["vocab"],
        state["tokenizer"],
    )
    if config.n_head < 1 or config.n_embd % config.n_head:
        raise UserError(
            f"{path}: n_head {config.n_head} does not divide n_embd {config.n_embd}; give another"
        )
    if config.n_layer > len(weights):  # and building so many may take for ever
        raise UserError(
            f"{path}: holds the weights of fewer than n_layer {config.n_layer} layers; give another"
        )
    with torch.device("meta"):  # shapes without memory
        expected = {name: tensor.shape for name, tensor in build_model(config).state_dict().items()}
    problems = [f"{path}: has no {name}" for name in expected.keys() - weights.keys()]
    problems += [
        f"{path}: has {name}, which the model has not" for name in weights.keys() - expected.keys()
    ]
    problems += [
        f"{path}: {name} is {tuple(weights[name].shape)}, its configuration asks for {tuple(expected[name])}"
        for name in expected.keys() & weights.keys()
        if weights[name].shape != expected[name]
    ]
    if problems:
        raise UserError(
            sorted(problems)[0]
            + (f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else "")
        )
    if type(vocab) is not int or not 0 < vocab <= config.vocab_size:
        raise UserError(
            f"{path}: its vocabulary is {vocab}, its table has {config.vocab_size} rows; give another"
        )
    return vocab, tokenizer if is_tokenizer(tokenizer, vocab) else dict(kind="unknown")


def is_tokenizer(spec, vocab: int) -> bool:
    """Whether `spec`, as tokenizer.Tokenizer takes it, has a text for each id below `vocab`."""
    kind, itos = (spec.get("kind"), spec.get("itos")) if isinstance(spec, dict) else (None, None)
    if kind == "char":
        return (
            isinstance(itos, list)
            and len(itos) >= vocab
            and all(isinstance(char, str) for char in itos)
        )
    return vocab <= dict(gpt2=GPT2_VOCAB, byte=256).get(kind, 0)


def crop_block_size(
    config: GPTConfig, weights: dict[str, Tensor], block_size: int
) -> tuple[GPTConfig, dict[str, Tensor]]:
    """
    The same model for a shorter context: the first block_size positions. Raises UserError for a
    longer one.
    """
    if block_size > config.block_size:
        raise UserError(
            f"block_size: {block_size}, but the pretrained model has {config.block_size} positions; "
            f"--block_size={config.block_size} or less"
        )
    if config.model == "gpt2":  # the fast model has no weights that belong to a position
        weights = weights | {
            "transformer.wpe.weight": weights["transformer.wpe.weight"][:block_size].clone()
        }
    return replace(config, block_size=block_size), weights


def fetch(name: str) -> Path:
    """
    The local folder of one of OpenAI's models, downloaded from the hub where it is not there yet.
    """
    try:
        from huggingface_hub import hf_hub_download

        paths = [
            hf_hub_download(f"openai-community/{name}", file)
            for file in ("config.json", "model.safetensors")
        ]
    except Exception as error:  # whatever the network throws
        raise UserError(
            f"{name}: cannot be fetched from the Hugging Face hub ({type(error).__name__}); go online once, "
            "or give a folder that holds its config.json and model.safetensors"
        ) from None
    return Path(paths[0]).parent


def read_hf(folder: Path) -> dict:
    """A Hugging Face GPT-2: config.json and model.safetensors, whole or in shards."""
    hf = read_json(folder / "config.json", mend="get it again")
    if hf.get("model_type") != "gpt2":
        raise UserError(
            f"{folder}: its model_type is {hf.get('model_type')!r}; only gpt2 can be converted"
        )
    sizes = {key: hf.get(key, value) for key, value in GPT2_SIZES.items()}
    if hf.get("n_inner") == 4 * sizes["n_embd"]:
        del hf["n_inner"]
    problems = [
        f"{folder / 'config.json'}: {key} is {hf[key]!r}; only GPT-2's {allowed[0]!r} can be converted"
        for key, allowed in GPT2_ONLY.items()
        if hf.get(key, allowed[0]) not in allowed
    ]
    problems += [
        f"{folder / 'config.json'}: {key} is {value!r}, not a size"
        for key, value in sizes.items()
        if type(value) is not int or value < 1
    ]
    if problems:
        raise UserError(*problems)
    config = GPTConfig(
        block_size=sizes.pop("n_positions"),
        tie_weights=hf.get("tie_word_embeddings", True),
        **sizes,
    )
    weights = {}
    for name, tensor in read_safetensors(folder).items():
        name = name.removeprefix("transformer.")
        if name.endswith(
            (".attn.bias", ".attn.masked_bias")
        ):  # causal masks that older versions stored
            continue
        tensor = tensor.float()
        name = name if name == "lm_head.weight" else f"transformer.{name}"
        weights[name] = tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor
    if config.tie_weights and "transformer.wte.weight" in weights:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    vocab, tokenizer = gpt2_vocabulary(config.vocab_size) or (
        config.vocab_size,
        hf.get("tokenizer_spec", dict(kind="unknown")),
    )
    return dict(model=weights, model_config=asdict(config), vocab=vocab, tokenizer=tokenizer)


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index, files = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file():
        files = sorted(
            {
                Path(file).name
                for file in read_json(index, mend="get it again").get("weight_map", {}).values()
            }
        )
        if not files:
            raise UserError(f"{index}: names no files; get it again")
    weights = {}
    for file in files:
        try:
            weights |= load_file(folder / file)
        except FileNotFoundError:
            raise UserError(
                f"{folder}: has no {file}; save the model again with transformers' save_pretrained"
            ) from None
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{folder / file}: damaged or cut short ({error}); get it again"
            ) from None
    return weights


def read_checkpoint(path: Path) -> dict:
    """A checkpoint file of this program or of nanoGPT."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # damaged files raise anything
        raise UserError(
            f"{path}: damaged, cut short, or more than tensors and plain values in it; give another"
        ) from None
    if isinstance(state, dict) and "model_config" in state:
        if damage := checkpoint.find_damage(path):
            raise UserError(f"{path}: {damage}")
        return state
    if isinstance(state, dict) and {"model", "model_args"} <= state.keys():
        return convert_nanogpt(state)
    raise UserError(f"{path}: neither a checkpoint of this program nor nanoGPT's; give another")


def convert_nanogpt(state: dict) -> dict:
    """
    nanoGPT's state in this program's terms. Compiled models have a prefix, old ones carry their
    causal masks.
    """
    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
    config = GPTConfig(
        **{name: value for name, value in state["model_args"].items() if name in names}
    )
    weights = {
        name.removeprefix("_orig_mod."): tensor.float() for name, tensor in state["model"].items()
    }
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith(".attn.bias")}
    vocab, tokenizer = gpt2_vocabulary(config.vocab_size) or (
        config.vocab_size,
        dict(kind="unknown"),
    )
    meta_path = dataset_folder(state.get("config", {}).get("dataset", "")) / "meta.pkl"
    if tokenizer["kind"] == "unknown" and meta_path.is_file():
        itos = read_meta(meta_path).get("itos", {})
        if len(itos) == vocab:
            tokenizer = dict(kind="char", itos=[itos[i] for i in range(vocab)])
    return dict(model=weights, model_config=asdict(config), vocab=vocab, tokenizer=tokenizer)


def gpt2_vocabulary(vocab_size: int) -> tuple[int, dict] | None:
    """
    GPT-2's vocabulary and tokenizer, where a table of this size means them: 50257, or that padded
    to 50304.
    """
    return (GPT2_VOCAB, dict(kind="gpt2")) if vocab_size in (GPT2_VOCAB, 50304) else None
