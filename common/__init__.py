"""Helpers that the whole program uses."""
