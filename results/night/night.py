# A small model for 46,460,455 training tokens (bpe, 8,192 ids), for
# a few minutes on two CPU cores. Made by data/prepare_text.py; the reasons: docs/own_text.md
# python train.py config/prose.py
# python sample.py --out_dir="out/prose"
out_dir = "out/night"
init_from = "auto"  # the same command resumes an interrupted run
dataset = "prose"  # 188 MB of English prose, bpe:8192
_tokens, _is_bytes = 46460455, False  # some numbers below depend on these

model = "fast"
n_layer, n_embd = 6, 256
n_head = 4
value_tables = 1
# the hashed bigram embedding; with a BPE it overfits a text that is read more than once
bigram_rows = 16384 if _is_bytes else 65536 if _tokens >= 3_150_000 else 0
# against overfitting over many epochs
dropout = 0.2 if _tokens < 500_000 else 0.1 if _tokens < 850_000 else 0.0
block_size = 256  # one to a few lines of bytes; with a BPE three to four times as much text
batch_size = 8  # 2,048 tokens per iteration
gradient_accumulation_steps = 1

optimizer = "muon"  # with the learning rates that this rule was measured with
learning_rate = 0.025
muon_momentum = 0.9
head_lr = 0.004
weight_decay = 0.001  # of embeddings and head
beta1 = 0.8
beta2 = 0.95
grad_clip = 0.0

warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7
min_lr = 0.0

eval_tokens = 262144  # or all of validation, if that is smaller
log_interval = 25
sample_tokens = 300
keep_checkpoints = 1  # the newest; best.pt, with the lowest validation loss, is kept too

compile = True
