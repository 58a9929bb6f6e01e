# A small GPT on the Python standard library's own source code, byte by byte: minutes on two CPU cores, no download.
# python train.py config/quickstart.py
out_dir = 'out/quickstart'
dataset = 'python_stdlib' # made in seconds on the first run
eval_interval = 250
eval_tokens = 65536
log_interval = 10
sample_tokens = 300

n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
batch_size = 16
gradient_accumulation_steps = 1

learning_rate = 3e-3 # small models stand a high one
min_lr = 3e-4
beta2 = 0.99 # few tokens per iteration: average the squared gradient over more of them
warmup_iters = 100
max_iters = 1000
keep_checkpoints = 1

dtype = 'float32' # at this size bfloat16's casts cost more than its products save
compile = False # compiling takes longer than it would save here
