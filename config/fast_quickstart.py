# The fast recipe on the quickstart's data: about two minutes on two CPU cores, like
# config/quickstart.py, but a lower loss.
# python train.py config/fast_quickstart.py
out_dir = "out/fast_quickstart"
init_from = "auto"  # the same command starts the run and resumes it
dataset = "python_stdlib"  # made on the first run, in seconds, from your Python's own source files

model = "fast"
n_layer = 3  # allows more iterations in the same time than the quickstart's 4
n_head = 4
n_embd = 128
value_tables = 1
bigram_rows = 65536  # rows of the bigram embedding, one for each pair of bytes
block_size = 128
batch_size = 16
gradient_accumulation_steps = 1

optimizer = "muon"  # learning rates as in config/fast124m_4070.py, except head_lr
learning_rate = 0.025
muon_momentum = 0.9  # 0.95 suits runs of thousands of iterations
head_lr = 0.004
weight_decay = 0.001
beta1 = 0.8
beta2 = 0.95
grad_clip = 0.0

max_iters = 1000  # 2.0M bytes
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7
min_lr = 0.0

eval_interval = 500
eval_tokens = 32768
log_interval = 25
sample_tokens = 300
keep_checkpoints = 1

compile = False  # compiling would take longer than it saves in so short a run
