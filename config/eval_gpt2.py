# OpenAI's GPT-2 on your validation split: the loss that a run on the same data must fall below to
# be better than it.
# python train.py config/eval_gpt2.py --dataset=fineweb_edu          GPT-2 from the Hugging Face
# hub, 124M parameters
# python train.py config/eval_gpt2.py --init_from=gpt2-xl            or gpt2-medium, gpt2-large, a
# local Hugging Face folder
init_from = "gpt2"
dataset = "fineweb_edu"  # tokenised with GPT-2's BPE
eval_only = True  # writes nothing

batch_size = 8
eval_tokens = 2097152  # those of config/gpt124m_*.py: the first of the validation split
compile = False  # a minute of compiling would save seconds
