# A small GPT-2 trained with AdamW on config/quickstart.py's data, for trying changes to the program
# (docs/hacking.md) and for measurements.
# python train.py config/small_gpt2.py
out_dir = "out/small_gpt2"
dataset = "python_stdlib"

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

compile = False
