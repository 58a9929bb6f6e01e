# A small model for your own text, in bytes or a small BPE: a few minutes on two CPU cores. It looks
# at the text's size, so its name comes after --dataset. docs/own_text.md gives the reasons.
# python data/prepare_text.py my_notes.txt
# python train.py --dataset=my_notes config/own_text.py
# python sample.py --out_dir=out/my_notes
from data.shards import dataset_folder, read_folder

_folder = dataset_folder(dataset)  # noqa: F821
_data = read_folder(_folder)
_tokens, _is_bytes = len(_data.train), _data.tokenizer["kind"] == "byte"
if not _tokens:
    raise ValueError(f"no tokens in {_folder}; give --dataset=NAME before this file's name")

out_dir = f"out/{_folder.name}"
init_from = "auto"  # the same command resumes an interrupted run

model = "fast"  # its layers are in model_fast.py, and Muon is in optimizer.py
# a larger model sees fewer tokens in the same time
n_layer, n_embd = (3, 128) if _is_bytes else (4, 160)
n_head = 4
bias = True
# reduces overfitting over many epochs
dropout = 0.2 if _tokens < 500_000 else 0.1 if _tokens < 850_000 else 0.0
block_size = 256  # a few lines of text as bytes; with a BPE three to four times as much
batch_size = 8  # 2,048 tokens per iteration
gradient_accumulation_steps = 1

optimizer = "muon"
learning_rate = 0.029
muon_momentum = 0.9
head_lr = 0.004
weight_decay = 0.001  # applies to embeddings and head
beta1 = 0.8
grad_clip = 0.0

# ten epochs of a small text; for a larger text, as many tokens as fit into a few minutes
max_iters = 1 + min(5_000_000 if _is_bytes else 3_150_000, 10 * _tokens) // 2048
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7
min_lr = 0.0
lr_floor = 0.2

eval_interval = 1 + max_iters // 10  # often enough that best.pt is near the lowest validation loss
eval_tokens = 262144  # or the whole validation split, if that is smaller
log_interval = 25
sample_tokens = 300
keep_checkpoints = 1  # the newest one; best.pt, with the lowest validation loss, is kept too

compile = False  # compiling would take longer than it saves
