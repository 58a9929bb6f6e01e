# The fast recipe at GPT-2 124M's size, on FineWeb-Edu with an RTX 4070 (12 GB).
# Its matmuls use 124M parameters; with embeddings and lookup tables it stores 379M.
# Target: with 1.30B tokens, reach the GPT-2 recipe's loss after 10B (docs/fast_recipe.md).
# Estimated, not measured (docs/status.md): 6.4 hours (6.2 to 6.4) for 1.30B tokens, by
# python bench.py plan config/fast124m_4070.py --gpu=4070
# python data/prepare_fineweb.py --tokens=2B && python train.py config/fast124m_4070.py
out_dir = "out/fast124m"
# To compare with the loss of 3.28 that others report, use FineWeb: "fineweb_records" here, after
# python data/prepare_fineweb.py --dataset=fineweb --order=records --tokens=10B
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and resumes it

# Rotary positions, QK-norm, ReLU^2, zero-initialised projections, capped logits, value embeddings
# and a bigram embedding: see model_fast.py
model = "fast"
n_layer = 12
n_head = 6  # heads of 128
n_embd = 768
value_tables = 3  # value embeddings for the first and last 3 layers; cost memory but no FLOPs
bigram_rows = 131072  # rows of the bigram embedding; cost memory but no FLOPs
block_size = 1024
batch_size = 8  # estimated: 9.9 GiB; 16 would need 12.9 GiB
tokens_per_iter = 524288  # sets gradient_accumulation_steps, whatever the batch_size

optimizer = "muon"  # for the layers' matrices; AdamW trains embeddings, head and vectors
learning_rate = 0.025
muon_momentum = 0.95
head_lr = 0.008  # as in nanochat, whose norms have no gains either
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
checkpoint_interval = 50  # every 8 minutes: the most that a crash can cost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
