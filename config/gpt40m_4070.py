# A GPT with 40M parameters on FineWeb-Edu with an RTX 4070 (12 GB): 10.5B tokens.
# Hours and memory: python bench.py plan config/gpt40m_4070.py --gpu=4070
# A published nanoGPT run of this size took 3.91 s per iteration on this card, 21.7 hours in all
# (results/public_runs).
out_dir = "out/gpt40m"
dataset = "fineweb_edu"

batch_size = 16
block_size = 1024
gradient_accumulation_steps = 32
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size  # 524,288, as in gpt124m

n_layer = 12
n_head = 6  # heads of 64
n_embd = 384
bias = False

# Smaller models tolerate higher rates. GPT-3's rate falls from 6e-4 at 125M parameters to 6e-5
# at the largest size, so a model with a third of 125M gets 1e-3.
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 715
max_iters = 20000

eval_interval = 500
eval_tokens = 2097152
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"  # autocast; needs no loss scaling
compile = True  # takes about a minute at the start
tf32 = True  # tensor cores for the matmuls that stay in float32
flash = True  # fused attention: stores no 1024 x 1024 matrices
pad_vocab_multiple = 128  # 50,257 ids -> 50,304, full tiles for the tensor cores
tie_weights = True  # one matrix for embedding and head saves 19.3M parameters
