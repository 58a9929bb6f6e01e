# GPT-124M on FineWeb-Edu with an RTX 4090 (24 GB). Not measured on that card.
# Modelled: 60 to 80 % of 165.2 TFLOP/s in bf16 gives 116,000 to 155,000 tokens/s, which is 18 to
# 24 hours for 10B tokens.
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and continues it after a stop

batch_size = 16  # modelled: 9.5 GB; 32 would need 15.3 GB
tokens_per_iter = 524288  # at any batch_size: gradient_accumulation_steps follows

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT. For the reasons see config/gpt124m_4070.py
max_iters = 19073

eval_interval = 1000  # every hour
eval_tokens = 2097152
checkpoint_interval = 250  # at most 19 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
