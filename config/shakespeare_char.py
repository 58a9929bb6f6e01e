# nanoGPT's Shakespeare, one character per token, in 1.2 to 1.4 times the CPU time of nanoGPT's CPU
# demo: two to three minutes on one core, with evaluations. Ends at val loss 1.54, the demo at 1.90
# (docs/own_text.md).
# python train.py config/shakespeare_char.py
out_dir = "out/shakespeare_char"
init_from = "auto"  # the same command starts the run and resumes it
dataset = "shakespeare_char"  # or nanoGPT's folder: --dataset=../nanoGPT/data/shakespeare_char

model = "fast"  # its layers are in model_fast.py
n_layer = 3
n_head = 4
n_embd = 128
bias = True
pad_vocab_multiple = 1
block_size = 128  # characters
batch_size = 12
gradient_accumulation_steps = 1

optimizer = "muon"  # optimizer.py has the rest of the recipe's rates and decays
learning_rate = 0.029
muon_momentum = 0.9
weight_decay = 0.001
beta1 = 0.8
grad_clip = 0.0

max_iters = 1000  # 1.536M characters, 1.5 epochs
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7
min_lr = 0.0

eval_interval = 500
eval_tokens = 111540  # the whole validation split, except 51 characters that do not fill a window
log_interval = 25
sample_tokens = 300
keep_checkpoints = 1

compile = False  # compiling would take longer than it saves in so short a run
