"""
Seed, save and restore the random states of torch, Python and numpy.
"""

import math
import random

import numpy as np
import torch


def set_seed(seed: int) -> None:
    """Seed torch, Python and numpy, so that code you add may use any of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32-bit seeds only


def get_rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """
    Return the random states of torch (used for dropout), Python and numpy (for code that you add)
    without waiting for the device.
    """
    # Python and numpy draw normals in pairs and keep the second one. inf encodes Python's None.
    _, numbers, half = random.getstate()
    python = [*numbers, math.inf if half is None else half]
    _, keys, *rest = np.random.get_state()
    states = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor(python, dtype=torch.float64),
        "numpy": torch.tensor([*keys, *rest], dtype=torch.float64),
    }
    if device.type != "cpu":
        states[device.type] = getattr(torch, device.type).get_rng_state()
    return states


def set_rng_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    *numbers, half = states["python"].tolist()
    random.setstate((3, tuple(map(int, numbers)), None if half == math.inf else half))
    *keys, at, has_half, half = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, "u4"), int(at), int(has_half), half))
    if device.type != "cpu" and device.type in states:
        getattr(torch, device.type).set_rng_state(states[device.type])
