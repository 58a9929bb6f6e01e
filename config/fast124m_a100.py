# The fast recipe at GPT-2 124M's size, on FineWeb-Edu with a rented A100 (40 or 80 GB).
# 124M parameters are used in matmuls; with embeddings and lookup tables it stores 471M.
# Target: with 1.30B tokens the loss of the GPT-2 recipe after 10B (docs/fast_recipe.md).
# Estimated, not measured (docs/status.md): 1.8 hours (1.7 to 1.9) for 1.30B tokens, by
# python bench.py plan config/fast124m_a100.py --gpu=a100
out_dir = "out/fast124m"
# The loss of 3.28 that others report is on FineWeb: "fineweb_records" here, and prepare it by
# python data/prepare_fineweb.py --dataset=fineweb --order=records --tokens=10B
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run, and resumes it after a stop

# Rotary positions, QK-norm, ReLU^2, zero-initialised projections, capped logits, value embeddings
# and a bigram embedding: see model_fast.py
model = "fast"
n_layer = 12
n_head = 6  # heads of 128
n_embd = 768
value_tables = 3  # value embeddings for the first and last 3 layers: memory, but no FLOPs
bigram_rows = 251520  # rows of the bigram embedding, 5 per token id: memory, but no FLOPs
block_size = 1024
batch_size = 32  # estimated: 20.3 GiB
tokens_per_iter = 524288  # sets gradient_accumulation_steps, whatever the batch_size

optimizer = "muon"  # for the layers' matrices; embeddings, head and vectors get AdamW
learning_rate = 0.025
muon_momentum = 0.95
head_lr = 0.008  # as in nanochat, whose norms have no gains either
weight_decay = 0.001
beta1 = 0.8
beta2 = 0.95
grad_clip = 0.0  # not needed: Muon's updates have the same size whatever the gradient's

max_iters = 2475  # 1.30B tokens; for a shorter run --max_iters=1400, or --hours, decays in time
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7  # constant for 30% of the run, then linearly down to zero
min_lr = 0.0

eval_interval = 125
eval_tokens = 2097152
checkpoint_interval = 125  # every 6 minutes: the most that a crash can cost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
