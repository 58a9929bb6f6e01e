# GPT-2 124M on FineWeb-Edu with an A100 (40 or 80 GB) rented by the hour.
# Hours and memory: python bench.py plan config/gpt124m_a100.py --gpu=a100
out_dir = "out/gpt124m"
# Others report a loss of 3.28 on FineWeb. To compare, set "fineweb_records" here, which
# train.py downloads; docs/training.md has the other flags
dataset = "fineweb_edu"

batch_size = 32
block_size = 1024
gradient_accumulation_steps = 16
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size  # 524,288, as in GPT-3

learning_rate = 6e-4  # GPT-3's rate for 125M parameters
warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT; config/gpt124m_4070.py explains the learning rates
max_iters = 19073

eval_interval = 1000
eval_tokens = 2097152
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"  # autocast; needs no loss scaling
compile = True  # takes about a minute at the start
tf32 = True  # tensor cores for the matmuls that stay in float32
flash = True  # fused attention: stores no 1024 x 1024 matrices
pad_vocab_multiple = 128  # 50,257 ids -> 50,304, full tiles for the tensor cores
tie_weights = True  # one matrix for embedding and head saves 38.6M parameters
