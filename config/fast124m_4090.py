# The fast recipe: GPT-124M on FineWeb-Edu with an RTX 4090 (24 GB).
# Not measured on that card. Estimated for 1.30B tokens: 3.3 hours (3.0 to 3.8), by
# python bench.py plan config/fast124m_4090.py --gpu=4090
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
bigram_rows = 251520  # for token pairs, 5 for each id; no FLOPs, but memory
block_size = 1024
batch_size = 16  # modelled: 14.3 GiB; 32 would need 20.3 GiB
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
checkpoint_interval = 125  # about 10 minutes are lost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"
compile = True
