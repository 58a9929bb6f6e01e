# GPT-124M on FineWeb-Edu with an RTX 3060 (12 GB).
# Not measured on that card. Estimated for 10B tokens: 143 hours (110 to 207), by
# python bench.py plan config/gpt124m_3060.py --gpu=3060
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and continues it after a stop

batch_size = 8  # modelled: 5.8 GiB
tokens_per_iter = 524288  # at any batch_size: gradient_accumulation_steps follows

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT. For the reasons see config/gpt124m_4070.py
max_iters = 19073

eval_interval = 250  # every 110 minutes
eval_tokens = 2097152
checkpoint_interval = 50  # about 23 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
