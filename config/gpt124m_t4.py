# GPT-2 124M on FineWeb-Edu with a T4 (16 GB), the card of free notebooks.
# Estimated, not measured (docs/status.md): 104 hours for 10B tokens, by
# python bench.py plan config/gpt124m_t4.py --gpu=t4
# Such a notebook ends after some hours: keep out_dir on a drive that stays, and run the same
# command again.
out_dir = "out/gpt124m"
# The loss of 3.28 that others report is on FineWeb: "fineweb_records" here, and prepare it by
# python data/prepare_fineweb.py --dataset=fineweb --order=records --tokens=10B
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run, and resumes it after a stop

batch_size = 8  # estimated: 6.1 GiB
tokens_per_iter = 524288  # as for GPT-3 of this size; decides, if --batch_size changes
gradient_accumulation_steps = 64  # 64 x 8 x 1024 = 524,288 tokens per iteration

learning_rate = 6e-4  # GPT-3's for 125M parameters
warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT; config/gpt124m_4070.py explains the rates
max_iters = 19073

eval_interval = 250  # every 80 minutes
eval_tokens = 2097152
checkpoint_interval = 50  # every 16 minutes: the most that a crash can cost
log_interval = 10
sample_tokens = 100

dtype = "float16"  # a T4 only emulates bfloat16; float16 uses loss scaling
compile = True  # takes about a minute at the start
tf32 = True  # changes nothing on a T4: TF32 came with the next generation
flash = True  # fused attention: keeps no 1024 x 1024 matrices
pad_vocab_multiple = 128  # 50,257 tokens -> 50,304, whole tiles of the tensor cores
tie_weights = True  # one matrix for embedding and head: 38.6M parameters fewer
