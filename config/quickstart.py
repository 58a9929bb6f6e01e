# A small GPT on the source code of Python's standard library, one byte per token. Takes about two
# minutes on two idle CPU cores that are fast in bfloat16 (AMX, or AMD with AVX512_BF16), and three
# to five on two cores without.
# python train.py config/quickstart.py
out_dir = "out/quickstart"
init_from = "auto"  # the same command starts the run and resumes it
dataset = "python_stdlib"  # made on the first run, in seconds, from your Python's own source files

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64  # bytes; 128 with half the batch_size ended at a higher loss
batch_size = 32
gradient_accumulation_steps = 1

learning_rate = 6e-3  # small models tolerate a high rate; 3e-3 and 1e-2 both ended at a higher loss
min_lr = 1e-4
beta2 = 0.99  # averages over more iterations, because each has few tokens
warmup_iters = 100
max_iters = 1500  # 3.1M bytes, 0.7 epochs

eval_interval = 500
eval_tokens = 32768
log_interval = 25
sample_tokens = 300
keep_checkpoints = 1

compile = False  # compiling would take longer than it saves in so short a run
