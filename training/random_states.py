"""
Save and restore the random states from which dropout draws.
"""

import torch


def get_rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return torch's random states without waiting for the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = getattr(torch, device.type).get_rng_state()
    return states


def set_rng_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        getattr(torch, device.type).set_rng_state(states[device.type])
