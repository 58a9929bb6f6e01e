# The fast recipe: 40M parameters in matmuls, on FineWeb-Edu with an RTX 4070 (12 GB).
# Estimated, not measured (docs/status.md): 2.3 hours (2.2 to 2.3) for 1.30B tokens, by
# python bench.py plan config/fast40m_4070.py --gpu=4070
out_dir = "out/fast40m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and resumes it

# Rotary positions, QK-norm, ReLU^2, zero-initialised projections, capped logits, value embeddings
# and a bigram embedding: see model_fast.py
model = "fast"
n_layer = 12
n_head = 3  # heads of 128
n_embd = 384
value_tables = 3  # value embeddings for the first and last 3 layers; cost memory but no FLOPs
bigram_rows = 131072  # rows of the bigram embedding; cost memory but no FLOPs
block_size = 1024
batch_size = 16  # estimated: 6.8 GiB
tokens_per_iter = 524288  # sets gradient_accumulation_steps, whatever the batch_size

optimizer = "muon"  # for the layers' matrices; AdamW trains embeddings, head and vectors
learning_rate = 0.025
muon_momentum = 0.95
head_lr = 0.011  # narrower models get a higher one; 0.008 suits a width of 768
weight_decay = 0.001
beta1 = 0.8
beta2 = 0.95
grad_clip = 0.0  # not needed: the size of Muon's updates does not depend on the gradient's

max_iters = 2475  # 1.30B tokens; --max_iters=1400 or --hours gives a shorter, complete run
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7  # constant for 30% of the run, then linearly down to zero
min_lr = 0.0

eval_interval = 125
eval_tokens = 2097152
checkpoint_interval = 125  # every 7 minutes: the most that a crash can cost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
