"""Small things that all of this program uses."""

import os

# on Windows most users may not make symbolic links; the hub's library would warn at length
os.environ.setdefault("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")
