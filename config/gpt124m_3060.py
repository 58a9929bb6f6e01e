# GPT-124M on FineWeb-Edu with an RTX 3060 (12 GB). Nothing here was measured on that card.
# Modelled: 25.5 TFLOP/s bf16 at the 4070's 82 % gives 24,600 tokens/s, so 21 s per iteration and
# 113 hours for 10B tokens.
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and goes on after a stop

batch_size = 8  # modelled: 6.5 GB
gradient_accumulation_steps = 64  # 8 * 1024 * 64 = 524,288 tokens per iteration

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT; the classic GPT-2 recipe: config/gpt124m_4070.py says why
max_iters = 19073

eval_interval = 250  # every 90 minutes
eval_tokens = 2097152
checkpoint_interval = 50  # at most 18 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
