"""The machine: its device and what it can do, what a model costs on it, and its processes."""
