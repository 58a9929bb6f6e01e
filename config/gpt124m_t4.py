# GPT-124M on FineWeb-Edu with a T4 (16 GB), the card of free notebooks.
# Not measured on that card. Estimated for 10B tokens: 104 hours (73 to 146), by
# python bench.py plan config/gpt124m_t4.py --gpu=t4
# The notebook ends after some hours. Keep out_dir on a drive that stays, and run the same command
# again.
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and continues it after a stop

batch_size = 8  # modelled: 6.1 GiB
tokens_per_iter = 524288  # at any batch_size: gradient_accumulation_steps follows

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT. For the reasons see config/gpt124m_4070.py
max_iters = 19073

eval_interval = 250  # every 80 minutes
eval_tokens = 2097152
checkpoint_interval = 50  # about 16 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "float16"  # a T4 only emulates bfloat16; float16 uses loss scaling
compile = True
