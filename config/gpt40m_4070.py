# A GPT with 40M parameters on FineWeb-Edu with an RTX 4070 (12 GB): 10.5B tokens.
# Not measured on that card. Estimated for 10.5B tokens: 23 hours (18 to 33), by
# python bench.py plan config/gpt40m_4070.py --gpu=4070
# One nanoGPT log, believed to be of this card, has 3,900 ms per iteration: 134,433 tokens/s.
out_dir = "out/gpt40m"
dataset = "fineweb_edu"
init_from = "auto"

# 32 micro-batches of 16 * 1024 tokens
batch_size = 16  # modelled: 4.4 GiB
block_size = 1024
tokens_per_iter = 524288  # at any batch_size: gradient_accumulation_steps follows

n_layer = 12
n_head = 6  # heads of 64
n_embd = 384
bias = False

# Narrower models tolerate higher rates: in GPT-3's table the rate falls from 6e-4 at 125M to 6e-5
# for the largest, so 1e-3 at a third of 125M
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 715
max_iters = 20000

eval_interval = 500
eval_tokens = 2097152
checkpoint_interval = 250  # every 17 minutes
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
