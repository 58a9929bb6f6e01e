"""A run: its start, its folder, its clock and its log."""
