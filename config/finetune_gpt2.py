# Fine-tune OpenAI's GPT-2 on your own text: see docs/own_text.md.
# python data/prepare_text.py my.txt --tokenizer=gpt2 --out=data/my_gpt2
# python train.py config/finetune_gpt2.py --dataset=my_gpt2
# python sample.py --out_dir=out/finetune_gpt2
# These are common values for about 1 MB of text. They are not tuned or measured on real text.
out_dir = "out/finetune_gpt2"
init_from = "gpt2"  # or gpt2-medium, gpt2-large, gpt2-xl; the same command resumes the run
dataset = "my_gpt2"  # prepared with --tokenizer=gpt2

tokens_per_iter = 8192  # in micro-batches of as many sequences as fit
dropout = 0.1  # the text is read several times

learning_rate = 3e-5  # far below the 6e-4 of training from scratch: the weights are already good
min_lr = 3e-6
warmup_iters = 10
max_iters = 90  # epochs * tokens / 8192; 90 are 3.5 epochs of 1 MB of English

eval_interval = 15  # the checkpoint with the lowest val loss is kept
eval_tokens = 16384
log_interval = 5
sample_tokens = 100
keep_checkpoints = 1  # the newest, and the best: 1.5 GB each

compile = False  # compiling would take longer than it saves
