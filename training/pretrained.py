"""
Read weights trained elsewhere: OpenAI's GPT-2, nanoGPT's checkpoints, and this program's.

Code in these files is never executed.
"""

import os
from dataclasses import fields, replace
from pathlib import Path

from common.console import UserError, one_line, warn
from common.files import read_json
from configurator import FIELDS
from data.shards import dataset_folder
from data.tokenizer import GPT2_VOCAB, read_meta
from model import FREE_ON_RESUME, GPTConfig
from model_fast import FastConfig, config_from_dict, config_to_dict
from training import checkpoint

# Keys that decide the weights' shapes and names: all keys among the models' fields, except those in
# FREE_ON_RESUME
ARCHITECTURE = (
    "model",
    *(f.name for f in fields(FastConfig) if f.name in FIELDS and f.name not in FREE_ON_RESUME),
)
HUB_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
# Hugging Face stores these matrices as (in, out), the transpose of nn.Linear's weights
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
NO_TOKENIZER = dict(kind="unknown")


def load_pretrained(name_or_path: str, block_size: int | None = None) -> dict:
    """
    Load the weights that init_from names: gpt2, gpt2-medium, gpt2-large or gpt2-xl from the hub, a
    checkpoint of this program or of nanoGPT, or a run's out_dir.

    Returns a dict: `model` (float32 weights under model.py's names), `model_config`, `vocab` (the
    vocabulary size before padding), `tokenizer`, and `source`, a description. A context longer than
    `block_size` is cropped. The vocabulary is not padded further, because new rows would take part
    in every softmax. Raises UserError if there are no such weights or they cannot be read.
    """
    state = read_weights(name_or_path)
    config = config_from_dict(state["model_config"])
    weights = state["model"]
    if block_size is not None and block_size < config.block_size:
        if not isinstance(config, FastConfig):  # the fast model has no position embeddings
            wpe = weights["transformer.wpe.weight"][:block_size].clone()
            weights = weights | {"transformer.wpe.weight": wpe}
        config = replace(config, block_size=block_size)
    known = {name: state[name] for name in ("vocab", "tokenizer", "source")}
    return dict(known, model=weights, model_config=config_to_dict(config))


def load_weights(model, state: dict) -> None:
    """Copy the weights into the model. Raises UserError if they do not fit or are not finite."""
    source = state.get("source", "the checkpoint")
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:  # a line for each kind of misfit, from the second on
        first = str(error).splitlines()[1].strip("\t .")
        hint = "use the config and the model.py that it was trained with"
        raise UserError(f"{source}: {first:.200}; {hint}") from None
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"{source}: {name} is not finite; give an older checkpoint")


# -----------------------------------------------------------------------------
# Which file


def find_weights(name_or_path: str, best: bool = False) -> Path:
    """
    Find the file that a name or path means: for a run its newest checkpoint, or with `best` its
    best.pt; for OpenAI's GPT-2 its folder. If a full disk or a kill has kept best.pt from
    being linked to the best checkpoint, warns and returns that checkpoint. Raises UserError if
    there is none.
    """
    path = Path(os.path.expanduser(name_or_path))  # shells do not expand the ~ in --init_from=~/x
    if name_or_path in HUB_MODELS and not path.exists():
        return fetch(name_or_path)
    if path.is_file():
        return path
    if best and (missed := checkpoint.missed_best(path)):
        warn(f"{path / 'best.pt'}: does not hold the run's best model; reading {missed}")
        return missed
    if best and (path / "best.pt").is_file():
        return path / "best.pt"
    if files := checkpoint.list_checkpoints(path):
        return files[-1]
    if (path / "ckpt.pt").is_file():
        return path / "ckpt.pt"
    what = "no checkpoint in it" if path.is_dir() else "no such file or folder"
    hint = f"give a checkpoint, a run's folder, or one of {', '.join(HUB_MODELS)}"
    raise UserError(f"{path}: {what}; {hint}")


def fetch(name: str) -> Path:
    """
    Return the folder of one of OpenAI's models, downloaded from the hub unless it is cached. Raises
    UserError if the download fails.
    """
    try:
        from huggingface_hub import hf_hub_download

        hf_hub_download(f"openai-community/{name}", "model.safetensors")
        return Path(hf_hub_download(f"openai-community/{name}", "config.json")).parent
    except Exception as error:  # a failing network raises all kinds of errors
        raise UserError(
            f"{name}: cannot be fetched from the Hugging Face hub ({one_line(error)}); "
            "once that is fixed, repeat the command"
        ) from None


# -----------------------------------------------------------------------------
# What is in it


def read_weights(name_or_path: str, best: bool = False) -> dict:
    """
    Read weights into the form of a checkpoint's state: `model`, `model_config`, `vocab` and
    `tokenizer`; `source` describes what was read. Raises UserError if it is not a model.
    """
    path = find_weights(name_or_path, best)
    try:
        state = read_gpt2(path) if path.is_dir() else read_checkpoint(path)
        return state | dict(source=describe_source(state, path))
    except Exception as error:  # files of other programs or versions raise all kinds of errors
        if not os.path.lexists(path):  # a run that saves there has deleted it, so look again
            return read_weights(name_or_path, best)
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: is not a model ({type(error).__name__}: {error})") from None


def describe_source(state: dict, path: Path) -> str:
    """
    Describe where weights come from, as far as is known: out/x/ckpt-00001500.pt, iteration 1,500,
    val loss 1.4851.
    """
    words = str(path)
    iter_num = state.get("progress", state).get("iter_num")
    if iter_num is not None:
        whose = "" if "progress" in state else " of nanoGPT"
        words += f"{whose}, iteration {iter_num:,}"
    val_loss = state.get("val_loss")
    if val_loss is not None:
        words += f", val loss {val_loss:.4f}"
    return words


def find_tokenizer(path: Path, rows: int, state: dict) -> tuple[int, dict]:
    """
    Return the vocabulary size and the tokenizer of a checkpoint at `path` that names none and whose
    embedding has this many rows. They come from a nanoGPT meta.pkl with as many characters, or from
    a guess that 50257 rows or, padded, 50304 are GPT-2's. Failing these, returns all rows and
    NO_TOKENIZER. `state` is the checkpoint.
    """
    folders = [path.parent]
    if dataset := state.get("config", {}).get("dataset"):
        folders += [above / "data" / dataset for above in path.resolve().parents]
        folders.append(dataset_folder(dataset))
    for meta in [folder / "meta.pkl" for folder in folders]:
        if meta.is_file():
            found, tokenizer = read_meta(meta)
            if found == rows:
                return rows, tokenizer
    # Guess only for other programs' weights: our own checkpoints name their tokenizer.
    if rows in (GPT2_VOCAB, 50304) and "model_config" not in state:
        return GPT2_VOCAB, dict(kind="gpt2")
    return rows, NO_TOKENIZER


def read_gpt2(folder: Path) -> dict:
    """Read OpenAI's GPT-2 from its files on the hub, config.json and model.safetensors."""
    from safetensors.torch import load_file

    hf = read_json(folder / "config.json", hint="get it again")
    sizes = {name: hf[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    config = GPTConfig(block_size=hf["n_positions"], **sizes)
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(".attn.bias"):
            continue  # a causal mask
        tensor = tensor.mT.contiguous() if name.endswith(TRANSPOSED) else tensor
        weights[f"transformer.{name.removeprefix('transformer.')}"] = tensor.float()
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return dict(
        model=weights,
        model_config=config_to_dict(config),
        vocab=config.vocab_size,
        tokenizer=dict(kind="gpt2"),
    )


# -----------------------------------------------------------------------------
# Checkpoints


def check_fields(path: Path, state: dict) -> None:
    """Raise UserError if a checkpoint's model has fields that this program does not know."""
    known = {"model", *(f.name for f in fields(FastConfig))}
    if strange := [f"{n}={v!r}" for n, v in state["model_config"].items() if n not in known]:
        hint = "use the model.py that it was trained with"
        raise UserError(f"{path}: its model has {', '.join(strange)}, unknown here; {hint}")


def read_checkpoint(path: Path) -> dict:
    """
    Read a checkpoint of this program or of nanoGPT, and return its state under this program's
    names. Raises UserError if it is neither.
    """
    state = checkpoint.load(path)
    if "model_config" in state:
        check_fields(path, state)
        if state["tokenizer"]["kind"] == "unknown":
            state["vocab"], state["tokenizer"] = find_tokenizer(path, state["vocab"], state)
        return state
    if "model_args" not in state:
        held = ", ".join(map(str, [*state][:3]))
        problem = "is not a checkpoint of this program or of nanoGPT"
        raise UserError(f"{path}: {problem}; it has no model_args, but {held}")
    config = GPTConfig(**state["model_args"])
    weights = {
        name.removeprefix("_orig_mod."): tensor.float()  # torch.compile's name for the model
        for name, tensor in state["model"].items()
        if not name.endswith(".attn.bias")  # a causal mask, which old checkpoints contain
    }
    vocab, tokenizer = find_tokenizer(path, config.vocab_size, state)
    return dict(
        model=weights,
        model_config=config_to_dict(config),
        vocab=vocab,
        tokenizer=tokenizer,
        config=state.get("config", {}),
        iter_num=state.get("iter_num"),
        val_loss=state.get("best_val_loss"),  # nanoGPT saves right after its best evaluation
    )
