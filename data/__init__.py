"""Scripts that make datasets, and the data folders they make (a package, so that train.py can call prepare_text)."""
