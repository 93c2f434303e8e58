"""What offload costs: bytes that a step moves, bytes that stay, and the seconds by which a step gets longer. No torch.

Counts may be NumPy arrays: one call then prices many layouts. Kinds of memory are those of `Cost.memory_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from espalier.plan.axes.offload_layout import BUFFERS, CHUNK
from espalier.recipe.cost import Number, Terms

STATES = ("params", "grads", "optimizer")
"""Kinds that the optimizer's step walks through."""
UNUSED = 0.5
"""Share of the memory that a plan leaves unused which what waits on disk takes after all; the rest is for errors of the
prediction."""
PENDING = 2
"""Activations at once that are on their way to the disk."""
BORDERS = 2
"""Inputs of blocks of each micro-batch in memory where a window of layers is there: the first block's, and those of the
block at work or their gradients."""
HELD = PENDING + 2
"""Inputs of blocks in memory: the first block's, those on their way, and the one at work."""


class TierRate(NamedTuple):
    """Bytes/s of one rank from a tier and to it, and the bytes that it may hold there: infinite where nobody knows."""

    read: float
    write: float
    room: float


class Moved(NamedTuple):
    """Bytes that a step reads from a tier and writes to it."""

    read: Number
    written: Number


@dataclass(frozen=True)
class HidingWork:
    """What hides reads and writes of a step.

    Attributes:
        optimizer, forward, backward: seconds of the step's; backward with what is computed again.
        layers: so many passes go through.
        rounds: micro-batches of a step.
        again: share of the parameters that backward reads once more.
    """

    optimizer: Number
    forward: Number
    backward: Number
    layers: Number
    rounds: Number = 1
    again: Number = 1.0


def walked(away: Terms) -> Moved:
    """What the optimizer's step moves: it reads all states, and writes all but gradients."""
    states = sum(away.get(kind, 0.0) for kind in STATES)
    return Moved(states, states - away.get("grads", 0.0))


def passed(away: Terms, again: Number = 1.0) -> Moved:
    """What forward and backward move of parameters on disk: values are read in forward, and the share `again` of them
    in backward; gradients are written once, however many micro-batches there are."""
    if "params" not in away:
        return Moved(0.0, 0.0)
    return Moved((1.0 + again) * away["params"], away["grads"])


def saved(away: Terms, rounds: Number) -> Moved:
    """What activations move: those of each micro-batch are written and read once."""
    size = rounds * away.get("activations", 0.0)
    return Moved(size, size)


def activations(block_bytes: Number, layers: Number) -> Number:
    """Bytes of a micro-batch on disk, of which each of `layers` blocks keeps `block_bytes`: what all but the last
    give."""
    return block_bytes * (layers - 1)


def activations_held(block_bytes: Number, layers: Number, rounds: Number = 0) -> Number:
    """Bytes of these in memory; `rounds`: micro-batches that are computed layer by layer."""
    return block_bytes * (np.minimum(layers, HELD) + rounds * np.minimum(layers, BORDERS))


def buffers(away: Terms, extent: Number = CHUNK) -> Number:
    """Bytes in memory through which states pass, in extents of so many bytes at most."""
    return np.minimum(walked(away).read, BUFFERS * np.minimum(CHUNK, extent))


def seconds(away: Terms, speed: TierRate, hiding: HidingWork) -> Number:
    """Seconds by which a step gets longer: the optimizer's walk goes at the pace of the slowest of reading, moving and
    writing, and begins with a read and ends with a write; passes wait for what they do not hide, and for the first
    layer."""
    step = walked(away)
    values = passed(away, hiding.again)
    activation_bytes = saved(away, hiding.rounds)
    read = step.read / speed.read
    write = step.written / speed.write
    pieces = np.maximum(1, np.ceil(step.read / CHUNK))
    taken = np.maximum(0.0, np.maximum(read, write) - hiding.optimizer) + (read + write) / pieces
    out = activation_bytes.written / speed.write
    back = activation_bytes.read / speed.read
    if "frozen" in away:  # read in forward, and in backward but for the last layer
        fetched = hiding.rounds * away["frozen"] / speed.read
        first = fetched / hiding.layers
        waited = np.maximum(fetched - hiding.forward, first)
        taken = taken + waited + np.maximum(fetched - first - hiding.backward, 0.0)
    if "params" in away:
        fetched = values.read / speed.read + values.written / speed.write + out + back
        taken = taken + np.maximum(fetched - hiding.forward - hiding.backward, fetched / hiding.layers)
    elif "activations" in away:
        layers = np.maximum(1, hiding.layers - 1)
        taken = taken + np.maximum(out - hiding.forward, 0.0) + np.maximum(back - hiding.backward, back / layers)
    return taken
