"""
Weights in and out: Hugging Face's GPT-2, nanoGPT's checkpoints, and this program's own.

    python convert.py hf-to-ckpt DIR OUT.pt            a folder with config.json and model.safetensors, or gpt2 .. gpt2-xl
    python convert.py ckpt-to-hf CKPT DIR              for AutoModelForCausalLM, AutoTokenizer and evaluation harnesses
    python convert.py nanogpt-to-ckpt IN.pt OUT.pt     nanoGPT's ckpt.pt

CKPT is a checkpoint or the out_dir of a run. Train on from a converted file with
--init_from=OUT.pt, sample from it with sample.py --init_from=OUT.pt. Nothing in a file that is read
here is ever executed.
"""

import json
import os
from pathlib import Path

import torch

from common.console import Parser, UserError, run_main
from model import GPTConfig
from training import checkpoint
from training.build import count_parameters
from training.pretrained import GPT2_ONLY, TRANSPOSED, read_weights

TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")
# OpenAI's, those tiktoken reads
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"

# -----------------------------------------------------------------------------
# Writing


def write_hf(state: dict, folder: Path) -> None:
    """
    The model as GPT2LMHeadModel, in float32: biases it has not are zeros, and the vocabulary's
    padding is cut off.
    """
    from safetensors.torch import save_file

    config, vocab, tokenizer = (
        GPTConfig(**state["model_config"]),
        state["vocab"],
        state["tokenizer"],
    )
    if config.model != "gpt2":
        raise UserError(
            "ckpt-to-hf: the fast model is no GPT-2, and Hugging Face has no architecture for it; use sample.py"
        )
    weights = {}
    for name, tensor in state["model"].items():
        if name.endswith(("wte.weight", "lm_head.weight")):
            tensor = tensor[:vocab]
        if name == "lm_head.weight" and config.tie_weights:
            continue
        weights[name] = (
            tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor.contiguous()
        )
    if not config.bias:
        for name, tensor in list(weights.items()):
            if not name.endswith(("wte.weight", "wpe.weight", "lm_head.weight")):
                weights[name.replace(".weight", ".bias")] = torch.zeros(tensor.shape[-1])
    eot = vocab - 1 if tokenizer["kind"] == "gpt2" else 0 if tokenizer["kind"] == "byte" else None
    hf = dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        dtype="float32",
        tokenizer_spec=tokenizer,
        bos_token_id=eot,
        eos_token_id=eot,
        vocab_size=vocab,
        n_positions=config.block_size,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        tie_word_embeddings=config.tie_weights,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        **{key: allowed[0] for key, allowed in GPT2_ONLY.items()},
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:  # an earlier model's
        (folder / name).unlink(missing_ok=True)
    temporary = folder / "model.safetensors.tmp"
    save_file(weights, temporary, metadata={"format": "pt"})
    os.replace(temporary, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")


def write_gpt2_tokenizer(folder: Path, block_size: int) -> bool:
    """
    GPT-2's tokenizer for AutoTokenizer, from the files that tiktoken has or gets; False where it
    cannot.
    """
    from tiktoken.load import read_file_cached

    try:
        vocab, merges = (
            read_file_cached(GPT2_FILES + name) for name in ("encoder.json", "vocab.bpe")
        )
    except Exception:  # whatever the network throws
        return False
    end = "<|endoftext|>"
    settings = dict(
        tokenizer_class="GPT2Tokenizer",
        bos_token=end,
        eos_token=end,
        unk_token=end,
        add_prefix_space=False,
        model_max_length=block_size,
    )
    for name, content in zip(
        TOKENIZER_FILES, (vocab, merges, json.dumps(settings, indent=2).encode())
    ):
        (folder / name).write_bytes(content)
    return True


# -----------------------------------------------------------------------------


def write_checkpoint(state: dict, path: Path) -> None:
    """Weights as a checkpoint of their own: there is no run in it to resume."""
    if path.exists() or path.suffix != ".pt" or path.name.startswith("ckpt-"):
        why = (
            "exists"
            if path.exists()
            else "has the name of a run's own"
            if path.suffix == ".pt"
            else "must end with .pt"
        )
        raise UserError(f"{path}: {why}; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(state, path)
    parameters, _ = count_parameters(GPTConfig(**state["model_config"]))
    print(
        f"{path}: {parameters / 1e6:.2f}M parameters, vocabulary {state['vocab']}, tokenizer {state['tokenizer']['kind']}; "
        f"train on from it or sample with --init_from={path}"
    )
    if state["tokenizer"]["kind"] == "unknown":
        print(
            "tokenizer: not known from the files, so the model trains but sample.py cannot turn its output into text"
        )


def hf_to_ckpt(source: str, out: str) -> None:
    write_checkpoint(read_weights(source), Path(out))


def nanogpt_to_ckpt(source: str, out: str) -> None:
    write_checkpoint(read_weights(source), Path(out))
    print(
        "note: nanoGPT computes the exact GELU, this program GPT-2's tanh form of it: logits differ by up to 1e-3"
    )


def ckpt_to_hf(source: str, out: str) -> None:
    state, folder = read_weights(source), Path(out)
    write_hf(state, folder)
    kind = state["tokenizer"]["kind"]
    if kind == "gpt2" and not write_gpt2_tokenizer(folder, state["model_config"]["block_size"]):
        print(
            "tokenizer: GPT-2's files are not here and cannot be fetched; AutoTokenizer.from_pretrained('gpt2') is the same"
        )
    elif kind != "gpt2":
        print(f"tokenizer: {kind}, which Hugging Face has no class for; no tokenizer files written")
    print(
        f"{folder}: GPT2LMHeadModel, vocabulary {state['vocab']}; load it with AutoModelForCausalLM.from_pretrained({out!r})"
    )


def main(argv: list[str]) -> None:
    parser = Parser(description="Weights to and from Hugging Face's GPT-2 and nanoGPT.")
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, run, source, out, text in (
        (
            "hf-to-ckpt",
            hf_to_ckpt,
            "DIR",
            "OUT",
            "a Hugging Face folder, or gpt2 .. gpt2-xl, as a checkpoint",
        ),
        (
            "ckpt-to-hf",
            ckpt_to_hf,
            "CKPT",
            "DIR",
            "a checkpoint, or a run's newest, as a Hugging Face folder",
        ),
        (
            "nanogpt-to-ckpt",
            nanogpt_to_ckpt,
            "IN",
            "OUT",
            "nanoGPT's ckpt.pt as a checkpoint of this program",
        ),
    ):
        sub = modes.add_parser(mode, help=text)
        sub.add_argument("source", metavar=source)
        sub.add_argument("out", metavar=out)
        sub.set_defaults(run=run)
    args = parser.parse_args(argv)
    try:
        args.run(args.source, args.out)
    except OSError as error:
        raise UserError(
            f"{args.out}: cannot be written ({error.strerror or error}); choose another place"
        ) from None


if __name__ == "__main__":
    run_main(main)
