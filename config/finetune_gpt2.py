# Fine-tune OpenAI's GPT-2 on your own text. docs/own_text.md
# python data/prepare_text.py my.txt --tokenizer=gpt2 --out=data/my_gpt2
# python train.py config/finetune_gpt2.py --dataset=my_gpt2
# python sample.py --out_dir=out/finetune_gpt2
# Not measured on real text: the numbers are common ones for about 1 MB, not tuned.
out_dir = "out/finetune_gpt2"
init_from = "gpt2"  # or gpt2-medium, gpt2-large, gpt2-xl; --init_from=resume continues the run
dataset = "my_gpt2"  # with GPT-2's tokens

batch_size = 4
tokens_per_iter = 8192  # at any batch_size: gradient_accumulation_steps follows
dropout = 0.1  # the text is read several times

learning_rate = 3e-5  # far below the 6e-4 of training from scratch: the weights are good already
min_lr = 3e-6
warmup_iters = 10
max_iters = 90  # three epochs of 1 MB, about 250,000 tokens; epochs * tokens / 8192

eval_interval = 15  # best.pt keeps the model of the best evaluation
eval_tokens = 16384
log_interval = 5
sample_tokens = 100
keep_checkpoints = 1  # 1.5 GB each, and as much for best.pt

compile = False  # compiling would take longer than it saves
