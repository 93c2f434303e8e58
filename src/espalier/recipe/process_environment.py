"""What a process of ours tells its libraries by environment variables, before torch is imported.

GNU OpenMP, whose threads torch computes with on processors, lets a thread that is done look for its next loop 300,000
times before it sleeps. That is 15 ms on a processor whose `pause` takes 140 cycles, in which it holds a core that the
threads of a compiled kernel (TBB's) want. With 20,000, on two cores, steps of a graph transformer of 1,024 and 4,096
tokens took 0.74 to 0.85 of the time, and those of a small dense transformer 1.01 times as long (three runs of each).
"""

from __future__ import annotations

import os

QUIET = ("TORCH_CPP_LOG_LEVEL", "2")
"""Errors alone: c10d's warnings of a store that does not answer look up names too, on whatever thread."""
SPINS = ("GOMP_SPINCOUNT", "20000")
"""Looks of a thread of GNU OpenMP before it sleeps."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
"""PyTorch's allocator on GPUs grows its segments, so that blocks of changing sizes leave fewer holes between them."""
OLDER = "PYTORCH_CUDA_ALLOC_CONF"
"""The name that variable had."""


def settle() -> None:
    """Sets what the user has left open."""
    if OLDER not in os.environ:
        os.environ.setdefault(*ALLOCATOR)
    os.environ.setdefault(*QUIET)
    if "OMP_WAIT_POLICY" not in os.environ:  # the user's word on the same
        os.environ.setdefault(*SPINS)


def allocation(device: str) -> dict[str, str]:
    """How memory of a GPU is allocated, for what a run says of its host."""
    how = os.environ.get(ALLOCATOR[0]) or os.environ.get(OLDER)
    return {} if device == "cpu" or how is None else {"allocator": how}
