# Trains a small model on your own text, as bytes or with a small BPE, in five to ten minutes on two
# CPU cores. The settings depend on the size of the text that --dataset names; docs/own_text.md
# gives the reasons.
# python data/prepare_text.py my_notes.txt
# python train.py config/own_text.py --dataset=my_notes
# python sample.py --out_dir=out/my_notes
import json

from data.shards import dataset_folder

_path = dataset_folder(dataset) / "manifest.json"  # noqa: F821
if not _path.is_file():
    raise ValueError(f"there is no {_path}; give --dataset=NAME as prepare_text.py prints it")
_manifest = json.loads(_path.read_text())
_tokens = sum(shard["tokens"] for shard in _manifest["shards"] if "train" in shard["name"])
_is_bytes = _manifest["tokenizer"] == "byte"

out_dir = f"out/{_path.parent.name}"

model = "fast"  # its layers are in model_fast.py
# a larger model sees fewer tokens in the same time
n_layer, n_embd = (3, 128) if _is_bytes else (4, 160)
n_head = 4
bias = True
# reduces overfitting over many epochs
dropout = 0.2 if _tokens < 500_000 else 0.1 if _tokens < 850_000 else 0.0
block_size = 256  # a few lines of text as bytes; with a BPE three to four times as much
batch_size = 8
tokens_per_iter = 2048

optimizer = "muon"  # optimizer.py has the rest of the recipe's rates and decays
learning_rate = 0.029
muon_momentum = 0.9
weight_decay = 0.001  # applies to embeddings and head
beta1 = 0.8
grad_clip = 0.0

# ten epochs of a small text; for a larger text, as many tokens as fit into a few minutes
max_iters = 1 + min(5_000_000 if _is_bytes else 3_150_000, 10 * _tokens) // tokens_per_iter
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7
min_lr = 0.0

eval_interval = 1 + max_iters // 10  # often enough that the best checkpoint is near the lowest loss
eval_tokens = 262144  # or the whole validation split, if that is smaller
log_interval = 25
sample_tokens = 300
keep_checkpoints = 1  # the newest, and the one with the lowest validation loss

compile = False  # compiling would take longer than it saves
