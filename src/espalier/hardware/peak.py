"""The most memory this process ever held."""

from __future__ import annotations

import resource

import torch


def peak_memory(device: torch.device) -> int:
    """Most bytes this rank ever held: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
