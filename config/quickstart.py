# The night's recipe made small: config/fast.py's model and updates on the source code of
# Python's standard library, one byte per token. A run took 40 s on two CPU cores with fast
# bfloat16, and 86 s on two that have only AVX2 (results/README.md).
# python train.py config/quickstart.py
out_dir = "out/quickstart"
dataset = "python_stdlib"  # made on the first run, in seconds, from your Python's own source files

model = "fast"  # its layers are in model_fast.py
n_layer = 3
n_head = 4
n_embd = 128
bias = True
block_size = 128  # bytes
batch_size = 16
gradient_accumulation_steps = 1

optimizer = "muon"  # optimizer.py has the rest of the recipe's rates and decays
learning_rate = 0.029
muon_momentum = 0.9  # better than 0.96 in so short a run (results/README.md)
weight_decay = 0.001
beta1 = 0.8
grad_clip = 0.0

max_iters = 300  # 0.6M bytes
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7
min_lr = 0.0

eval_interval = 150
eval_tokens = 65536  # a quarter of the validation split
log_interval = 10
sample_tokens = 300
keep_checkpoints = 1

compile = False  # compiling would take longer than it saves in so short a run
