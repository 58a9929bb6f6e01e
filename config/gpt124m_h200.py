# GPT-124M on FineWeb-Edu with an H200 (141 GB). Not measured on that card yet.
# Modelled: 35 to 50 % of 989 TFLOP/s in bf16 gives 400,000 to 580,000 tokens/s, which is 5 to 7
# hours for 10B tokens.
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and continues it after a stop

batch_size = 32  # modelled: 15.3 GB
tokens_per_iter = 524288  # at any batch_size: gradient_accumulation_steps follows

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT. For the reasons see config/gpt124m_4070.py
max_iters = 19073

eval_interval = 1000  # every 20 minutes
eval_tokens = 2097152
checkpoint_interval = 500  # at most 10 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
