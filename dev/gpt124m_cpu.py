# GPT-2 124M on a CPU, for measurements at full model size, not for finishing a training run: at
# about 400 tokens/s on two cores that are fast in bfloat16, 10B tokens would take nine months.
out_dir = "out/gpt124m_cpu"
init_from = "auto"  # the same command starts the run and resumes it
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
dtype = "auto"  # bfloat16 on CPUs where that is faster, else float32
compile = True  # takes a minute and saves memory; the speed is about the same
