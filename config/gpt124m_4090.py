# GPT-124M on FineWeb-Edu with an RTX 4090 (24 GB).
# Not measured on that card. Estimated for 10B tokens: 26 hours (23 to 29), by
# python bench.py plan config/gpt124m_4090.py --gpu=4090
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and continues it after a stop

batch_size = 16  # modelled: 8.3 GiB; 32 would need 13.2 GiB
tokens_per_iter = 524288  # at any batch_size: gradient_accumulation_steps follows

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT. For the reasons see config/gpt124m_4070.py
max_iters = 19073

eval_interval = 1000  # every 81 minutes
eval_tokens = 2097152
checkpoint_interval = 250  # about 20 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
