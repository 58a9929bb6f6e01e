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

import torch
from safetensors.torch import save as to_safetensors
from torch.nn import functional as F

from common.console import Parser, UserError, run_main, say
from common.files import replacing
from data.tokenizer import Tokenizer
from model import GPTConfig
from model_fast import FastConfig, FastGPT, build_model, config_from_dict, config_to_dict
from training import checkpoint
from training.pretrained import GPT2_SETTINGS, NANOGPTS, TRANSPOSED, load_pretrained, read_weights

# OpenAI's files, the ones that tiktoken reads
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
# The fast model's code. An exported folder holds X.py as nightshift_X.py.
CODE_FILES = ("training/modeling_fast.py", "model_fast.py", "model.py")
AUTO_MAP = dict(
    AutoConfig="nightshift_modeling_fast.FastConfig",
    AutoModelForCausalLM="nightshift_modeling_fast.FastForCausalLM",
)
# Of the largest logit. Rounding in float32 is 1e-6 of it in trained models, and 7e-6 where weights
# are ten times as large; the exact GELU in place of the tanh one is 1e-4.
TOLERANCE = 2e-5
NO_CLASS = "transformers has no class for that; share the checkpoint and model.py (docs/export.md)"

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
    config = config_from_dict(state["model_config"])
    fast = isinstance(config, FastConfig)
    weights = fast_weights(state) if fast else gpt2_weights(state)
    hf = hf_config(state["tokenizer"], config, state["vocab"])
    check_logits(state, weights, hf)
    code = fast_code() if fast else {}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as file:
        file.write(to_safetensors(weights, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    for name, text in code.items():
        (folder / name).write_text(text, encoding="utf-8")
    kind = state["tokenizer"]["kind"]
    if kind not in ("gpt2", "bpe"):
        say(f"tokenizer: Hugging Face has no class for it ({kind}); no tokenizer files written")
    else:
        write_tokenizer(folder, state["tokenizer"], config.block_size)
    trust = ", trust_remote_code=True" if fast else ""
    say(f"{folder}: written; load it with AutoModelForCausalLM.from_pretrained({out!r}{trust})")
    return state["source"]


def gpt2_weights(state: dict) -> dict[str, torch.Tensor]:
    """
    The weights with Hugging Face's names and shapes: without padding of the vocabulary, and with
    zeros for biases that the model does not have.
    """
    config, vocab = config_from_dict(state["model_config"]), state["vocab"]
    weights = {}
    for name, tensor in state["model"].items():
        if name == "lm_head.weight" and config.tie_weights:
            continue
        if name.endswith(("wte.weight", "lm_head.weight")):
            tensor = tensor[:vocab]
        elif name.endswith(TRANSPOSED):
            tensor = tensor.mT
        weights[name] = copied(tensor)
        has_bias = name.endswith((".ln_1.weight", ".ln_2.weight", ".ln_f.weight", *TRANSPOSED))
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
def check_logits(state: dict, weights: dict, hf: dict) -> None:
    """
    Raises UserError unless the exported weights, computed as transformers will, give the logits of
    the checkpoint's own model. People change model.py; transformers' GPT-2 stays as it is.
    """
    config, vocab = config_from_dict(state["model_config"]), state["vocab"]
    model = build_model(config).eval()
    # a copy, because `assign` marks the dict, so that later loads of it would assign too
    model.load_state_dict(dict(state["model"]), assign=True)
    generator = torch.Generator().manual_seed(0)
    # a full context: a sliding window matters only beyond its length
    idx = torch.randint(vocab, (1, config.block_size), generator=generator)
    if hf["eos_token_id"] is not None:  # the model may attend only within a document
        idx[0, config.block_size // 2] = hf["eos_token_id"]
    logits = model(idx)[..., :vocab]
    if isinstance(model, FastGPT):
        exported = model.logits(model.hidden(idx))[..., :vocab]
        problem = "training/modeling_fast.py calls hidden and logits; do there what forward adds"
    else:
        problem = f"model.py computes something else than GPT-2; {NO_CLASS}"
        try:
            exported, unused = gpt2_logits(weights, hf, idx)
        except (KeyError, RuntimeError):
            raise UserError(f"its tensors are not GPT-2's: {problem}") from None
        if unused:
            names = ", ".join(unused[:3]) + ", ..." * (len(unused) > 3)
            raise UserError(f"GPT-2 has no {names}; {NO_CLASS}")
    largest = (exported - logits).abs().max()
    if not largest <= TOLERANCE * logits.abs().max():
        raise UserError(f"logits differ by {largest:.2g}: {problem}")


def gpt2_logits(
    weights: dict[str, torch.Tensor], hf: dict, idx: torch.Tensor
) -> tuple[torch.Tensor, list[str]]:
    """
    idx (1, T) -> logits (1, T, V), as transformers' GPT-2 computes them from an export, without
    model.py; and the names of the unused tensors. Raises KeyError or RuntimeError if a tensor
    is missing or has another shape.
    """
    unused = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = unused.pop(f"{name}.weight"), unused.pop(f"{name}.bias")
        return F.layer_norm(x, x.shape[-1:], weight, bias)

    def linear(x: torch.Tensor, name: str, width: int) -> torch.Tensor:
        weight = unused.pop(f"{name}.weight").reshape(x.size(-1), width)
        return x @ weight + unused.pop(f"{name}.bias")

    wte, C = unused.pop("wte.weight"), hf["n_embd"]
    x = wte[idx] + unused.pop("wpe.weight")[: idx.size(1)]
    for layer in range(hf["n_layer"]):
        qkv = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn", 3 * C)
        q, k, v = qkv.unflatten(-1, (3, hf["n_head"], -1)).permute(2, 0, 3, 1, 4)  # (1, nh, T, hs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(y, f"h.{layer}.attn.c_proj", C)
        hidden = linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc", 4 * C)
        x = x + linear(F.gelu(hidden, approximate="tanh"), f"h.{layer}.mlp.c_proj", C)
    return norm(x, "ln_f") @ unused.pop("lm_head.weight", wte).T, [*unused]


def hf_config(tokenizer: dict, config: GPTConfig, vocab: int) -> dict:
    """config.json. The key tokenizer_spec is this program's, for hf-to-ckpt."""
    tied = config.tie_weights
    eot = {"gpt2": vocab - 1, "byte": 0}.get(tokenizer["kind"])
    if tokenizer["kind"] == "bpe":
        eot = Tokenizer(tokenizer).eot
    hf: dict = dict(dtype="float32", tokenizer_spec=tokenizer, bos_token_id=eot, eos_token_id=eot)
    hf |= dict(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
    hf |= dict(n_positions=config.block_size, vocab_size=vocab, tie_word_embeddings=tied)
    # without tokenizer files AutoTokenizer must fail, instead of opening an empty GPT-2 tokenizer
    hf |= dict(tokenizer_class="PreTrainedTokenizerFast")
    if isinstance(config, FastConfig):
        hf |= dict(
            model_type="nightshift_fast", model_config=config_to_dict(config), auto_map=AUTO_MAP
        )
        return hf | dict(architectures=["FastForCausalLM"])
    hf |= dict(model_type="gpt2", architectures=["GPT2LMHeadModel"])
    hf |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    return hf | {key: allowed[0] for key, allowed in GPT2_SETTINGS.items()}


def fast_code() -> dict[str, str]:
    """
    The modelling file of a fast model and the files it imports, by name. Raises UserError if they
    import more of this program.
    """
    root, files = Path(__file__).parent, {}
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
    from tiktoken.load import read_file_cached

    settings: dict = dict(model_max_length=block_size)
    if tokenizer["kind"] == "bpe":
        text = Tokenizer(tokenizer)
        end, settings["tokenizer_class"] = text.decode([text.eot]), "PreTrainedTokenizerFast"
        # without settings that go beyond encoding, which training does not apply
        content = json.loads(tokenizer["json"])
        content |= dict(post_processor=None, truncation=None, padding=None)
        (folder / "tokenizer.json").write_text(json.dumps(content))
    else:
        try:
            vocab = read_file_cached(GPT2_FILES + "encoder.json")
            merges = read_file_cached(GPT2_FILES + "vocab.bpe")
        except Exception:  # whatever the network throws
            say("tokenizer: cannot get GPT-2's files; AutoTokenizer.from_pretrained('gpt2') can")
            return
        end, settings["tokenizer_class"] = "<|endoftext|>", "GPT2Tokenizer"
        (folder / "vocab.json").write_bytes(vocab)
        (folder / "merges.txt").write_bytes(merges)
    settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


# -----------------------------------------------------------------------------
# To a checkpoint


def to_ckpt(source: str, out: str) -> str:
    """
    Write weights as a checkpoint, without a run to resume. Returns in words what they were. Raises
    UserError.
    """
    state, path = load_pretrained(source), Path(out)
    if path.exists():
        raise UserError(f"{path}: exists; choose another name")
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
