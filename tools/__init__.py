"""What bench.py, compare.py, convert.py and sample.py are made of."""
