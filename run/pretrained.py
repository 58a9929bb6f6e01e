"""
Read weights trained elsewhere: GPT-2 models of the Hugging Face hub, nanoGPT's checkpoints, and
this program's.

Code in these files is never executed.
"""

from dataclasses import replace
from pathlib import Path

from common.console import UserError, one_line
from common.files import read_json, sha256_of
from data.shards import dataset_folder
from data.tokenizer import GPT2_VOCAB, Tokenizer, read_bpe, read_meta
from model import GPTConfig
from model_fast import FastConfig, config_from_dict, config_to_dict
from run import checkpoint
from run.checkpoint import State, state_of

# On the hub, OpenAI's models belong to openai-community
OPENAI_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
HUB_FILES = ["config.json", "model.safetensors", "tokenizer.json"]
# Settings in a hub model's config.json, with the values that model.py computes. Where sizes differ,
# the weights do not fit.
COMPUTED = dict(
    model_type=("gpt2",),
    activation_function=("gelu_new", "gelu_pytorch_tanh"),
    layer_norm_epsilon=(1e-5,),
    scale_attn_weights=(True,),
    scale_attn_by_inverse_layer_idx=(False,),
)
# Hugging Face stores these matrices as (in, out), the transpose of nn.Linear's weights
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def load_pretrained(name_or_path: str, block_size: int | None = None) -> State:
    """
    Load the weights that init_from names: gpt2, gpt2-medium, gpt2-large, gpt2-xl or OWNER/NAME from
    the hub, a folder with a hub model's files, a checkpoint of this program or of nanoGPT, or a
    run's out_dir.

    Returns float32 weights, their sizes and tokenizer, and a description as their source. A context
    longer than `block_size` is cropped. The vocabulary is not padded further, because new rows
    would take part in every softmax. Raises UserError if there are no such weights or they cannot
    be read.
    """
    path = Path(name_or_path)
    if name_or_path in OPENAI_MODELS and not path.exists():
        folder = fetch(f"openai-community/{name_or_path}")
        state = read_gpt2(folder, dict(kind="gpt2"))
        source = name_or_path
    elif name_or_path.count("/") == 1 and not path.parent.exists():  # out/mistyped is a path
        state = read_weights(str(fetch(name_or_path)))
        source = name_or_path
    else:
        state = read_weights(name_or_path)
        source = state.source
    config = config_from_dict(state.model_config)
    weights = state.model
    if block_size is not None and block_size < config.block_size:
        if not isinstance(config, FastConfig):  # the fast model has no position embeddings
            wpe = weights["transformer.wpe.weight"][:block_size].clone()
            weights = weights | {"transformer.wpe.weight": wpe}
        config = replace(config, block_size=block_size)
    return State(source, weights, config_to_dict(config), state.vocab, state.tokenizer)


# -----------------------------------------------------------------------------
# Which file


def fetch(repository: str) -> Path:
    """
    Return the folder of a hub model, OWNER/NAME, downloaded unless it is cached. The folder lacks
    the HUB_FILES that the hub lacks. Raises UserError if the download fails.
    """
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(repository, allow_patterns=HUB_FILES))
        # The library compares sizes alone. It links a large file to one named after its SHA-256.
        weights = (folder / "model.safetensors").resolve()
        if len(weights.name) == 64 and sha256_of(weights) != weights.name:
            weights.unlink()
            raise ValueError("its weights are not those that the hub promises")
        return folder
    except Exception as error:  # a failing network raises all kinds of errors
        problem = "no such file or folder, and cannot be fetched from the Hugging Face hub"
        hint = "correct the name, or repeat the command when you are online"
        raise UserError(f"{repository}: {problem} ({one_line(error)}); {hint}") from None


def read_weights(name: str) -> State:
    """
    Read the weights at a path; their source describes what was read. The path is a file, a run's
    folder, which means its checkpoint with the lowest validation loss, or a hub model's folder.
    Raises UserError if there is no model.
    """
    path = Path(name)
    try:
        if path.is_file():
            state = read_checkpoint(path, checkpoint.load(path))
        elif found := checkpoint.load_first(path, checkpoint.best_first):
            state = read_checkpoint(*found)
        elif (path / "ckpt.pt").is_file():
            path = path / "ckpt.pt"
            state = read_checkpoint(path, checkpoint.load(path))
        elif (path / "config.json").is_file():
            state = read_gpt2(path)
        else:
            what = "no checkpoint in it" if path.is_dir() else "no such file or folder"
            names = f"{', '.join(OPENAI_MODELS)}, or a hub model's OWNER/NAME"
            raise UserError(f"{path}: {what}; give a checkpoint, a run's out_dir, {names}")
    except UserError:
        raise
    except Exception as error:  # files of other programs or versions raise all kinds of errors
        raise UserError(f"{path}: is not a model ({one_line(error)})") from None
    # such as out/x/ckpt-00001500.pt, iteration 1,500, val loss 1.4851
    if it := state.iter_num:
        state.source += f", iteration {it:,}"
    if state.val_loss is not None:
        state.source += f", val loss {state.val_loss:.4f}"
    return state


def find_tokenizer(path: Path, rows: int, saved: dict) -> tuple[int, dict]:
    """
    Return the vocabulary size and the tokenizer of a checkpoint at `path` that names none and whose
    embedding has this many rows. They come from a nanoGPT meta.pkl with as many characters. Without
    one, 50257 rows, or 50304 with padding, are taken to be GPT-2's, and others belong to an unknown
    tokenizer. `saved` is what the checkpoint holds.
    """
    folders = [path.parent]
    if dataset := saved.get("config", {}).get("dataset"):
        folders += [above / "data" / dataset for above in path.resolve().parents]
        folders.append(dataset_folder(dataset))
    for meta in [folder / "meta.pkl" for folder in folders]:
        if meta.is_file():
            found, tokenizer = read_meta(meta)
            if found == rows:
                return rows, tokenizer
    # Guess only for other programs' weights: our own checkpoints name their tokenizer.
    if rows in (GPT2_VOCAB, 50304) and "model_config" not in saved:
        return GPT2_VOCAB, dict(kind="gpt2")
    return rows, dict(kind="unknown")


def read_gpt2(folder: Path, tokenizer: dict | None = None) -> State:
    """
    Read a GPT-2 of the hub from its files. Its tokenizer is in tokenizer.json unless it is known.
    Raises UserError if model.py cannot compute the model, or if a file is missing.
    """
    from safetensors.torch import load_file

    for name in HUB_FILES[:2] if tokenizer else HUB_FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder}: has no {name}; docs/own_text.md says how to make it")
    hf = read_json(folder / "config.json", hint="get it again")
    for key, values in COMPUTED.items():
        if (value := hf.get(key, values[0])) not in values:
            raise UserError(f"{folder}: its {key} is {value!r}; only {values[0]!r} can be computed")
    sizes = {name: hf[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    tied = hf.get("tie_word_embeddings", True)
    config = GPTConfig(block_size=hf["n_positions"], tie_weights=tied, **sizes)
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # a causal mask
        if name != "lm_head.weight":
            name = f"transformer.{name.removeprefix('transformer.')}"
        weights[name] = (tensor.mT.contiguous() if name.endswith(TRANSPOSED) else tensor).float()
    if tied:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    vocab = config.vocab_size
    if not tokenizer:
        tokenizer = read_bpe(folder)
        # models are often padded with ids that their tokenizer lacks
        vocab = min(vocab, Tokenizer(tokenizer, folder).vocab)
    return State(str(folder), weights, config_to_dict(config), vocab, tokenizer)


# -----------------------------------------------------------------------------
# Checkpoints


def read_checkpoint(path: Path, saved: dict) -> State:
    """
    Return what a checkpoint of this program or of nanoGPT holds. Raises UserError if it is neither.
    """
    if "model_config" in saved:
        state = state_of(path, saved)
        if state.tokenizer["kind"] == "unknown":
            state.vocab, state.tokenizer = find_tokenizer(path, state.vocab, saved)
        return state
    if "model_args" not in saved:
        raise UserError(f"{path}: is not a checkpoint of this program or of nanoGPT")
    config = GPTConfig(**saved["model_args"])
    weights = {
        name.removeprefix("_orig_mod."): tensor.float()  # torch.compile's name for the model
        for name, tensor in saved["model"].items()
        if not name.endswith(".attn.bias")  # a causal mask, which old checkpoints contain
    }
    vocab, tokenizer = find_tokenizer(path, config.vocab_size, saved)
    # nanoGPT saves right after its best evaluation
    it, loss = saved.get("iter_num", 0), saved.get("best_val_loss")
    return State(str(path), weights, config_to_dict(config), vocab, tokenizer, it, loss)
