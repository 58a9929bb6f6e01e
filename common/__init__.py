"""Helpers that the whole program uses."""

import os

# Most Windows users may not create symbolic links, and the hub's library would warn at length.
os.environ.setdefault("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")
