"""What bench.py, compare.py and convert.py are made of, and the picture of a run that has ended."""
