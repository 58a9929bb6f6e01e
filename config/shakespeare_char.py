# nanoGPT's Shakespeare, character by character, in the processor time of its demo for a CPU: two
# minutes on one core.
# python train.py config/shakespeare_char.py
# docs/own_text.md has the text, and the table of both.
out_dir = "out/shakespeare_char"
init_from = "auto"  # the same command resumes where it was stopped
dataset = "shakespeare_char"  # nanoGPT's folder, or --dataset=../nanoGPT/data/shakespeare_char

model = "fast"
n_layer = 3
n_head = 4
n_embd = 128
value_tables = 1
bigram_rows = 4225  # one for each pair of the 65 characters
pad_vocab_multiple = 1
block_size = 128  # characters; 256 with a smaller batch_size ended higher
batch_size = 12
gradient_accumulation_steps = 1

optimizer = "muon"  # with the rates of config/fast_quickstart.py, but the head's
learning_rate = 0.025
muon_momentum = 0.9
head_lr = 0.002  # 0.001 and 0.004 were worse, and so was dropout: 1.5 epochs are few
weight_decay = 0.001
beta1 = 0.8
beta2 = 0.95
grad_clip = 0.0

max_iters = 1000  # 1.536M characters, 1.5 epochs
warmup_iters = 0
lr_schedule = "wsd"
decay_fraction = 0.7
min_lr = 0.0

eval_interval = 500
eval_tokens = 16384  # the easier part: the whole split is 0.1 higher, see docs/own_text.md
log_interval = 25
sample_tokens = 300
keep_checkpoints = 1

compile = False  # compiling would take longer than it saves
