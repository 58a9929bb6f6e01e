"""A run: its plan and start, its folder, clock and log, and what can be read from them."""
