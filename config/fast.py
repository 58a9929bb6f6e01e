# Close to GPT-2's loss in one night: about 3.28 on FineWeb after 1.44B tokens.
#
# Model and updates come from a public program, whose eight runs of 2,726 iterations on H200s
# averaged 3.2785 (docs/fast_recipe.md); dev/compare_modded.py compares the two programs.
# Hours and memory: python bench.py plan config/fast.py --gpu=4070
# If those runs' tokens are missing, train.py downloads them (docs/fast_recipe.md).
out_dir = "out/fast"
dataset = "fineweb_records"  # or "fineweb_edu", whose losses are lower, or your own

# Rotary positions, QK-norm, ReLU^2, zero-initialised projections, capped logits: see model_fast.py
model = "fast"
n_layer = 12
n_head = 6  # heads of 128
n_embd = 768
bias = True  # biases in all layers, and gains in the norms
block_size = 1024
tokens_per_iter = 524288  # in micro-batches of as many sequences as fit; batch_size would set them

# The rest of the recipe, such as the rates of embeddings, head and vectors, is in optimizer.py.
optimizer = "muon"  # for the layers' matrices; AdamW trains everything else
learning_rate = 0.029
muon_momentum = 0.96
weight_decay = 0.001
beta1 = 0.8
grad_clip = 0.0  # not needed: the size of Muon's updates does not depend on the gradient's

max_iters = 2750  # 1.44B tokens; --max_iters=2200 or --hours gives a shorter, complete run
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7  # constant for 30% of the run, then linearly towards zero
min_lr = 0.0  # but optimizer.py lets no rate fall below a fifth of its peak

eval_interval = 250
eval_tokens = 10485760  # the published runs evaluated on the same tokens
log_interval = 10
sample_tokens = 100

dtype = "auto"  # autocast in bfloat16; in float16 on GPUs before the RTX 30 series
compile = True  # takes about a minute at the start
tf32 = True  # tensor cores for the matmuls that stay in float32
flash = True  # fused attention: stores no 1024 x 1024 matrices
pad_vocab_multiple = 128  # 50,257 ids -> 50,304, full tiles for the tensor cores
tie_weights = False  # a head of its own learns faster than the embedding's matrix
