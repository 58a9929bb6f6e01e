# GPT-124M on FineWeb-Edu with an RTX 3060 (12 GB). Not measured on that card.
# Modelled: the 4070's 82 % of 25.5 TFLOP/s in bf16 gives 24,600 tokens/s, which is 21 s per
# iteration and 113 hours for 10B tokens.
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and continues it after a stop

batch_size = 8  # modelled: 6.6 GB
tokens_per_iter = 524288  # at any batch_size: gradient_accumulation_steps follows

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT. For the reasons see config/gpt124m_4070.py
max_iters = 19073

eval_interval = 250  # every 90 minutes
eval_tokens = 2097152
checkpoint_interval = 50  # at most 18 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
