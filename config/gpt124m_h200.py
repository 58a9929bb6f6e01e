# GPT-124M on FineWeb-Edu with an H200 (141 GB). Nothing here was measured on that card yet.
# Modelled: 989 TFLOP/s bf16 at 35 to 50 % gives 400,000 to 580,000 tokens/s: 5 to 7 hours for 10B
# tokens.
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and goes on after a stop

batch_size = 64  # modelled: 31.6 GB
gradient_accumulation_steps = 8  # 64 * 1024 * 8 = 524,288 tokens per iteration

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT; the classic GPT-2 recipe: config/gpt124m_4070.py says why
max_iters = 19073

eval_interval = 1000  # every 20 minutes
eval_tokens = 2097152
checkpoint_interval = 500  # at most 10 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
