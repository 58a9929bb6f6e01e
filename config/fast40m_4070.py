# The recipe of config/fast124m_4070.py at 40M parameters in matmuls, on an RTX 4070 (12 GB). Nobody
# has measured it at this size.
# Estimated, not measured (docs/status.md): 3.3 hours with evaluations and checkpoints. Iterations
# alone take 3.1 (2.5 to 3.4) hours, by
# python bench.py plan config/fast40m_4070.py --gpu=4070
out_dir = "out/fast40m"
dataset = "fineweb_records"  # or "fineweb_edu", whose losses are lower, or your own
init_from = "auto"  # the same command starts the run and resumes it

# Rotary positions, QK-norm, ReLU^2, zero-initialised projections, capped logits: see model_fast.py
model = "fast"  # its layers and optimizer are in model_fast.py
n_layer = 12
n_head = 3  # heads of 128
n_embd = 384
bias = True  # biases in all layers, and gains in the norms
block_size = 1024
batch_size = 32  # estimated: 7.9 GiB
tokens_per_iter = 524288  # sets gradient_accumulation_steps, whatever the batch_size

optimizer = "muon"  # for the layers' matrices; AdamW trains embeddings, head and vectors
learning_rate = 0.029
muon_momentum = 0.96
head_lr = 0.004
weight_decay = 0.001
beta1 = 0.8
grad_clip = 0.0  # not needed: the size of Muon's updates does not depend on the gradient's

max_iters = 2750  # 1.44B tokens; --max_iters=2200 or --hours gives a shorter, complete run
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7  # constant for 30% of the run, then linearly towards zero
min_lr = 0.0
lr_floor = 0.2  # but never below a fifth of the peak

eval_interval = 250
eval_tokens = 10485760
checkpoint_interval = 125  # every 8 minutes: the most that a crash can cost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
