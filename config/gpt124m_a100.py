# GPT-2 124M on FineWeb-Edu with an A100 (40 or 80 GB) rented by the hour.
# Estimated, not measured (docs/status.md): 14.0 hours (13.3 to 14.6) for 10B tokens, by
# python bench.py plan config/gpt124m_a100.py --gpu=a100
out_dir = "out/gpt124m"
# The loss of 3.28 that others report is on FineWeb: "fineweb_records" here, and prepare it by
# python data/prepare_fineweb.py --dataset=fineweb --order=records --tokens=10B
dataset = "fineweb_edu"
init_from = "auto"  # the same command starts the run, and resumes it after a stop

batch_size = 32  # estimated: 13.2 GiB
tokens_per_iter = 524288  # as for GPT-3 of this size; decides, if --batch_size changes
gradient_accumulation_steps = 16  # 16 x 32 x 1024 = 524,288 tokens per iteration

learning_rate = 6e-4  # GPT-3's for 125M parameters
warmup_iters = 715
# 10.0B tokens, one epoch of sample-10BT; config/gpt124m_4070.py explains the rates
max_iters = 19073

eval_interval = 1000  # every 44 minutes
eval_tokens = 2097152
checkpoint_interval = 250  # every 11 minutes: the most that a crash can cost
log_interval = 10
sample_tokens = 100

dtype = "bfloat16"  # autocast, without loss scaling
compile = True  # takes about a minute at the start
tf32 = True  # on the tensor cores, for what bfloat16 leaves in float32
flash = True  # fused attention: keeps no 1024 x 1024 matrices
pad_vocab_multiple = 128  # 50,257 tokens -> 50,304, whole tiles of the tensor cores
tie_weights = True  # one matrix for embedding and head: 38.6M parameters fewer
