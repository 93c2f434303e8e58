"""Detects ranks that another launcher started, by the variables of PyTorch (torchrun, Kubernetes, Ray), srun or
mpiexec."""

from __future__ import annotations

import os
from importlib import import_module

from espalier.train.rank_spec import RankSpec

LAUNCHERS = (
    ("torchrun", ("RANK", "WORLD_SIZE")),
    ("srun", ("SLURM_PROCID",)),
    ("mpiexec", ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")),
)
"""Modules of this package in the order in which they are asked, and the variables that their launchers set."""


def place() -> RankSpec | None:
    """This process's place among those a launcher has started, or None when nobody has. Same call on every rank.

    Raises UserError when a launcher's variables contradict one another, or its ranks cannot meet.
    """
    for launcher, variables in LAUNCHERS:
        if any(name in os.environ for name in variables):
            place: RankSpec | None = import_module(f"espalier.launch.launchers.{launcher}").place()
            if place is not None:
                return place
    return None
