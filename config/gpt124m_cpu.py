# GPT-124M on a CPU: to try the whole machinery at full model size, not to finish a training.
# Two cores that are fast in bfloat16 do some 400 tokens/s: 10B tokens would take nine months.
out_dir = "out/gpt124m_cpu"
init_from = "auto"  # the same command resumes where it was stopped
dataset = "fineweb_edu"

batch_size = 4
block_size = 256
gradient_accumulation_steps = 4

warmup_iters = 10
max_iters = 100
eval_interval = 50
eval_tokens = 8192
log_interval = 1

device = "cpu"
dtype = "auto"  # bfloat16 where the processor is faster in it, else float32
compile = True  # takes a minute; then less memory, at about the same speed
