"""Provide transformers' GPT-2 as a reference, models as the hub has them, and a tokenizer."""

from pathlib import Path

import tokenizers
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from model import GPT, GPTConfig
from model_fast import FastGPT, build_model

# transformers keeps these as (in, out)
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def random_model(config: GPTConfig, std: float = 0.3) -> GPT | FastGPT:
    """Return a model in eval mode without zero weights, so that everything in it matters."""
    torch.manual_seed(0)
    model = build_model(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model.eval()


def as_transformers(weights: dict[str, torch.Tensor], c) -> GPT2LMHeadModel:
    """
    Return transformers' GPT-2 with these weights, and zeros for biases that they lack. `c` has its
    sizes under our names.
    """
    wte, head = (weights[f"{name}.weight"] for name in ("transformer.wte", "lm_head"))
    sizes = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, n_positions=c.block_size)
    sizes |= dict(vocab_size=len(wte), tie_word_embeddings=torch.equal(wte, head))
    reference = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    found = {}
    for name, tensor in reference.state_dict().items():
        found[name] = weights.get(name, torch.zeros_like(tensor))
        if name in weights and name.endswith(TRANSPOSED):
            found[name] = weights[name].t()
    reference.load_state_dict(found)
    return reference


def random_gpt2(folder: Path, **changes) -> GPT2LMHeadModel:
    """
    Save a transformers GPT-2 with weights far from their initial ones, and own_bpe(), as the hub
    has them. Return the model.
    """
    torch.manual_seed(0)
    sizes = dict(n_positions=16, n_layer=2, n_head=2, n_embd=32, vocab_size=128)
    reference = GPT2LMHeadModel(GPT2Config(**sizes | changes)).eval()
    for parameter in reference.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    reference.save_pretrained(folder)
    own_bpe().save(str(folder / "tokenizer.json"))
    return reference


def own_bpe(end: str = "<|endoftext|>") -> tokenizers.Tokenizer:
    """
    Train a byte-level BPE of fewer than 300 ids. Like some published tokenizers, it puts `end`
    before each text by default and truncates to four tokens.
    """
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[end],
        initial_alphabet=bpe.pre_tokenizer.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the cat sat on the mat, that is where the cat sat"] * 2, trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, 0)]
    )
    bpe.enable_truncation(4)
    return bpe
