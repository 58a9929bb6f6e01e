"""
Import torch and count the FLOPs of two tiny models, in the process from which fork_server.py forks
all others. With what torch then remembers, each of them takes half the time to begin a run. The
program itself is forgotten again, because a forked process may run a changed copy of it.
"""

import sys

import torch._dynamo  # which torch imports with the first optimizer  # noqa: F401

from machine.cost import count_flops  # noqa: E402
from model import GPTConfig  # noqa: E402
from model_fast import FastConfig  # noqa: E402

for sizes in (GPTConfig, FastConfig):
    count_flops(sizes(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=128))
scripts = ("common", "configurator", "data", "machine", "model", "model_fast", "optimizer")
for name in [name for name in sys.modules if name.split(".")[0] in scripts]:
    del sys.modules[name]
