# GPT-2 124M on FineWeb-Edu with a T4 (16 GB), the GPU of free notebooks.
# Estimated, not measured (docs/status.md): 104 hours (63 to 146) for 10B tokens, by
# python bench.py plan config/gpt124m_t4.py --gpu=t4
# Such a notebook shuts down after a few hours. Keep out_dir on persistent storage, and run the same
# command again to resume.
out_dir = "out/gpt124m"
# Others report a loss of 3.28 on FineWeb. To compare, set "fineweb_records" here after running
# the download in docs/fast_recipe.md
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and resumes it

batch_size = 8  # estimated: 6.1 GiB
tokens_per_iter = 524288  # as in GPT-3 at this size; kept if you change --batch_size
gradient_accumulation_steps = 64  # 64 x 8 x 1024 = 524,288 tokens per iteration

learning_rate = 6e-4  # GPT-3's rate for 125M parameters
warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT; config/gpt124m_4070.py explains the learning rates
max_iters = 19073

eval_interval = 250  # every 80 minutes
eval_tokens = 2097152
checkpoint_interval = 50  # every 16 minutes: the most that a crash can cost
log_interval = 10
sample_tokens = 100

dtype = "float16"  # a T4 only emulates bfloat16; float16 uses loss scaling
compile = True  # takes about a minute at the start
tf32 = True  # has no effect on a T4: TF32 came with the next generation
flash = True  # fused attention: stores no 1024 x 1024 matrices
pad_vocab_multiple = 128  # 50,257 ids -> 50,304, full tiles for the tensor cores
tie_weights = True  # one matrix for embedding and head saves 38.6M parameters
