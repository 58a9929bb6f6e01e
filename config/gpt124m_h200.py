# GPT-2 124M on FineWeb-Edu with an H200 (141 GB).
# Estimated, not measured (docs/status.md): 5.6 hours for 10B tokens, by
# python bench.py plan config/gpt124m_h200.py --gpu=h200
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run, and resumes it after a stop

batch_size = 32  # estimated: 13.2 GiB
tokens_per_iter = 524288  # sets gradient_accumulation_steps, whatever the batch_size

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT; config/gpt124m_4070.py explains the rates
max_iters = 19073

eval_interval = 1000  # every 18 minutes
eval_tokens = 2097152
checkpoint_interval = 500  # every 9 minutes: the most that a crash can cost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
