"""Meshes of given degrees, on ranks that are numbered along the axes."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from espalier.parallel import mesh
from espalier.parallel.mesh import Coordinates, Mesh


class ParallelDegrees(NamedTuple):
    """Ranks along each axis of a regular mesh."""

    replica: int = 1
    pp: int = 1
    dp: int = 1
    cp_out: int = 1
    cp_in: int = 1
    hp: int = 1
    tp: int = 1


def regular(degrees: ParallelDegrees, experts: int = 1) -> Mesh:
    """The mesh of `degrees`, the last axis fastest. Raises UserError where `experts` does not divide its ranks."""
    every = itertools.product(*(range(degree) for degree in degrees))
    coordinates = {rank: Coordinates(*values) for rank, values in enumerate(every)}
    last = {rank for rank, coordinate in coordinates.items() if coordinate.pp == degrees.pp - 1}
    return mesh._made(("trainer",) * len(coordinates), coordinates, last, experts)
