# The fast recipe at the size of nanoGPT's "baby GPT", on Shakespeare's characters, without a GPU.
# docs/own_text.md says how to get the text, and what losses this config reaches.
# python train.py config/shakespeare_char.py
out_dir = "out/shakespeare_char"
dataset = "shakespeare_char"  # or nanoGPT's folder: --dataset=../nanoGPT/data/shakespeare_char

model = "fast"  # its layers are in model_fast.py
n_layer = 6
n_head = 6
n_embd = 384
bias = True
dropout = 0.1  # with 0 or 0.2 the loss ended higher, in one run of each
pad_vocab_multiple = 1
block_size = 256  # characters
batch_size = 32
gradient_accumulation_steps = 1

optimizer = "muon"  # optimizer.py has the rest of the recipe's rates and decays
learning_rate = 0.029
muon_momentum = 0.9
weight_decay = 0.001
beta1 = 0.8
grad_clip = 0.0

max_iters = 500  # 4.1M characters
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7
min_lr = 0.0

eval_interval = 100
eval_tokens = 111540  # the whole validation split, except what does not fill a window
log_interval = 25
sample_tokens = 300
keep_checkpoints = 1

compile = False  # compiling takes about as long as it saves in a run this short
