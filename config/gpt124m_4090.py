# GPT-124M on FineWeb-Edu with an RTX 4090 (24 GB). Nothing here was measured on that card.
# Modelled: 165.2 TFLOP/s bf16 at 60 to 80 % gives 116,000 to 155,000 tokens/s: 18 to 24 hours for
# 10B tokens.
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and goes on after a stop

batch_size = 16  # modelled: 10.1 GB; 32 would need 17.3 GB
gradient_accumulation_steps = 32  # 16 * 1024 * 32 = 524,288 tokens per iteration

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT; the classic GPT-2 recipe: config/gpt124m_4070.py says why
max_iters = 19073

eval_interval = 1000  # every hour
eval_tokens = 2097152
checkpoint_interval = 250  # at most 19 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
