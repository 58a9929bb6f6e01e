# GPT-124M on FineWeb-Edu with a T4 (16 GB), as free notebooks lend it. Nothing here was measured on
# that card.
# Modelled: a 70 W card that sustains 42 of its 65 TFLOP/s; at 60 % of that 30,000 tokens/s, 94
# hours for 10B tokens.
# The notebook ends after some hours: keep out_dir on a drive that stays, and run the same command
# again.
out_dir = "out/gpt124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and goes on after a stop

batch_size = 8  # modelled: 6.5 GB
gradient_accumulation_steps = 64  # 8 * 1024 * 64 = 524,288 tokens per iteration

warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT; the classic GPT-2 recipe: config/gpt124m_4070.py says why
max_iters = 19073

eval_interval = 250  # every 70 minutes
eval_tokens = 2097152
checkpoint_interval = 50  # at most 15 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "float16"  # a T4 only emulates bfloat16; float16 comes with loss scaling
compile = True
