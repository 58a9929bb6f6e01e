# The loss of OpenAI's GPT-2 on your validation split: what a run on the same data has to beat.
# python train.py config/eval_gpt2.py --dataset=fineweb_edu    GPT-2 124M from Hugging Face
# python train.py config/eval_gpt2.py --init_from=gpt2-xl      or gpt2-medium, gpt2-large, a folder
init_from = "gpt2"
dataset = "fineweb_edu"  # tokenised with GPT-2's BPE
eval_only = True  # evaluates once, and writes nothing

batch_size = 8
eval_tokens = 2097152  # as many as the GPU configs evaluate on, so that losses compare
compile = False  # compiling takes a minute and would save seconds
