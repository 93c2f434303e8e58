"""Ranks somebody else has started: by PyTorch's own variables (torchrun, Kubernetes, Ray), by srun's or mpiexec's."""

from __future__ import annotations

from espalier.launch import mpiexec, slurm, torchrun
from espalier.launch.base import Place


def place(threads: int | None = None) -> Place | None:
    """This process's place among those a launcher has started, or None when nobody has. Same call on every rank.

    Raises UserError when a launcher's variables contradict one another, or its ranks cannot meet.
    """
    return torchrun.place(threads) or slurm.place(threads) or mpiexec.place(threads)
