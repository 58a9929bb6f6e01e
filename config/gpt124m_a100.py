# GPT-124M on FineWeb-Edu with an A100 (40 or 80 GB) rented by the hour.
# Not measured on that card. Estimated for 10B tokens: 14.0 hours (12.1 to 16.3), by
# python bench.py plan config/gpt124m_a100.py --gpu=a100
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and continues it after a stop

batch_size = 32  # modelled: 13.2 GiB
tokens_per_iter = 524288  # at any batch_size: gradient_accumulation_steps follows

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT. For the reasons see config/gpt124m_4070.py
max_iters = 19073

eval_interval = 1000  # every 44 minutes
eval_tokens = 2097152
checkpoint_interval = 250  # a rented machine may vanish: about 11 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
