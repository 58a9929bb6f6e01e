# GPT-2 124M on FineWeb-Edu with an RTX 4070 (12 GB): 10B tokens. GPUs before the RTX 30 series need
# dtype = "float16".
# Hours and memory: python bench.py plan config/gpt124m_4070.py --gpu=4070
# A published nanoGPT run on this card took 9.35 s per iteration (results/public_runs).
# python data/prepare_fineweb.py --tokens=10B && python train.py config/gpt124m_4070.py
out_dir = "out/gpt124m"
# Others report a loss of 3.28 on FineWeb. To compare, set "fineweb_records" here, which
# train.py downloads; docs/training.md has the other flags
dataset = "fineweb_edu"

batch_size = 8  # 16 fits too; nobody has measured whether it is faster
block_size = 1024
gradient_accumulation_steps = 64
# 524,288, as in GPT-3. With a flag such as --batch_size=16 it stays the same, in 32 micro-batches
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size

# GPT-2's smallest size. The width, heads of 64 and a vocabulary padded to 50,304 suit tensor cores.
n_layer = 12
n_head = 12
n_embd = 768
bias = False

# GPT-3's rate for 125M parameters. 3e-4 learns more slowly; 1e-3 suits a third of this size.
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 715  # 375M tokens, as in GPT-3
max_iters = 19073  # 10.0B tokens, one epoch of sample-10BT

eval_interval = 500
eval_tokens = 2097152
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"  # has float32's range, so it needs no loss scaling
compile = True  # takes about a minute at the start
tf32 = True  # tensor cores for the matmuls that stay in float32
flash = True  # fused attention: stores no 1024 x 1024 matrices
pad_vocab_multiple = 128  # 50,257 ids -> 50,304, full tiles for the tensor cores
tie_weights = True  # one matrix for embedding and head saves 38.6M parameters
