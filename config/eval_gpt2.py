# Evaluate OpenAI's GPT-2 on your validation split, to see what a run on the same data has to beat.
# python train.py config/eval_gpt2.py --dataset=fineweb_edu    GPT-2 124M from Hugging Face
# python train.py config/eval_gpt2.py --init_from=gpt2-xl      or gpt2-medium, gpt2-large, a folder
init_from = "gpt2"
dataset = "fineweb_edu"  # must be tokenized with GPT-2's BPE
eval_only = True  # evaluate once and write nothing

batch_size = 8
eval_tokens = 2097152  # the same as in the GPU configs, so that losses are comparable
compile = False  # compiling takes a minute and would save seconds
