# The fast recipe: GPT-124M on FineWeb-Edu with an RTX 3060 (12 GB), 1.30B tokens instead of 10B.
# Not measured on that card. Estimated for 1.30B tokens: 18.6 hours (14.2 to 26.8), by
# python bench.py plan config/fast124m_3060.py --gpu=3060
# python data/prepare_fineweb.py --tokens=2B && python train.py config/fast124m_3060.py
out_dir = "out/fast124m"
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run and continues it after a stop

# rotary positions, QK-norm, ReLU^2, zero-initialised projections, capped logits, value embeddings,
# token pairs: model_fast.py
model = "fast"
n_layer = 12
n_head = 6  # heads of 128
n_embd = 768
value_tables = 3  # value embeddings of the first and last 3 layers; no FLOPs, but memory
bigram_rows = 131072  # for token pairs; no FLOPs, but memory
block_size = 1024
batch_size = 8  # modelled: 9.9 GiB; 16 would need 12.9 GiB
tokens_per_iter = 524288  # at any batch_size: gradient_accumulation_steps follows

optimizer = "muon"  # for the matrices of the layers; AdamW for embedding, head and vectors
learning_rate = 0.025
muon_momentum = 0.95
head_lr = 0.008  # nanochat's, for norms without gains
weight_decay = 0.001
beta1 = 0.8
beta2 = 0.95
grad_clip = 0.0  # Muon's updates have one size, whatever the gradient's

max_iters = 2475  # 1.30B tokens; --max_iters=1400 or --hours is a complete, shorter schedule
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7  # constant for 30 %, then down to zero
min_lr = 0.0

eval_interval = 125
eval_tokens = 2097152
checkpoint_interval = 25  # about 11 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
