"""Check which tokenizer belongs to nanoGPT's checkpoints."""

import pickle

from char_dataset import write_nanogpts_checkpoint

from data.tokenizer import Tokenizer
from training.pretrained import load_pretrained


def test_meta_pkl_beside_a_nanogpt_checkpoint_is_used_even_if_its_size_is_gpt2s(tmp_path):
    path = write_nanogpts_checkpoint(tmp_path / "ckpt.pt", vocab=50257, width=8)
    assert load_pretrained(str(path))["tokenizer"] == dict(kind="gpt2")
    itos = {i: chr(0x4E00 + i) for i in range(50257)}
    meta = dict(vocab_size=50257, itos=itos, stoi={c: i for i, c in itos.items()})
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    state = load_pretrained(str(path))
    assert state["vocab"] == 50257
    assert Tokenizer(state["tokenizer"]).decode([0, 50256]) == itos[0] + itos[50256]
