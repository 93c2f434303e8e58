"""Overlap cost: how long a round must be to hide its exchange, and what rounds cost. Formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from espalier.comm import compressed_collectives
from espalier.comm.codecs import codec as codec_of
from espalier.machine.cluster import Link
from espalier.optim.diloco_slowmo import OuterMethod
from espalier.recipe.cost import Cost, Number, ring_bytes

MARGIN = 1.1
"""Rounds are planned this much longer than a flight."""


def copies(chosen: OuterMethod, on_host: bool = True) -> float:
    """Copies of what a rank moves that the outer engine holds at its fullest. Law: `test_cost.py`.

    All the time: the outer parameters, the momentum, with a penalty of the `gap` the last update, what a lossy codec
    keeps back, and with `eager` a replica's own difference before and after a departure. For a fragment in flight: what
    was sent, its sum, what the codec will have kept back, and the bytes on their way out and in (of a processor; a
    GPU's lie in host memory). Another sum is released late: two fragments count, and one more sum where flights are
    used late.
    """
    lossy = not codec_of(chosen.codec).lossless
    wire = 2.0 / compressed_collectives.ratio(codec_of(chosen.codec)) if on_host else 0.0
    copies_kept = 1 + (chosen.momentum > 0) + (chosen.penalty == "gap") + lossy + 2 * chosen.eager
    flying = 2 + lossy + (chosen.average == "parameters") + wire
    return copies_kept + min(1.0, 2 / chosen.fragments) * flying + (chosen.delay > 0) / chosen.fragments


def flight_seconds(size: Number, replicas: Number, link: Link, ratio: Number = 1.0) -> Number:
    """Seconds of one exchange of `size` bytes of parameters among `replicas`, encoded `ratio` times smaller: a direct
    exchange, two phases of (G-1)/G of the bytes from each."""
    sent = 2 * size * (replicas - 1) / replicas / ratio
    return link.launch + 2 * link.latency + sent / link.bandwidth


def least_steps(flight: float, step: float) -> int:
    """Local steps of a round that hide a flight: ceil(1.1 * flight / step)."""
    return max(1, math.ceil(MARGIN * flight / step))


class OuterRound(NamedTuple):
    """What a rank gives in a round of so many steps: elements of each fragment, of `width` bytes each; `copies` of all
    of them are held."""

    fragments: Sequence[Number]
    steps: Number
    codec: str = "exact"
    width: int = 4
    copies: float = 0.0


def cost(given: OuterRound, replicas: int, link: Link) -> Cost:
    """What outer rounds add to each step of a rank.

    `sent`: `outer_step`, the ledger's bytes of a round's exchange over its steps, of the first replica, which sends
    most: headers included, at most that for codecs without fixed length. `seconds`: `outer`, the flight's share of a
    step, hidden or not; `memory_bytes`: `outer`.
    """
    chosen, size = codec_of(given.codec), given.width * sum(given.fragments)
    sent = sum(
        compressed_collectives.sent_bytes(chosen, "all_reduce", fragment, (0, replicas), given.width)
        for fragment in given.fragments
    )
    exact = 2 * size * (replicas - 1) / replicas
    return Cost(
        seconds={"outer": flight_seconds(size, replicas, link, exact / sent) / given.steps},
        sent={"outer_step": sent / given.steps},
        memory_bytes={"outer": given.copies * size},
        sources={"outer": "2(G-1)/G bytes / bandwidth, once in a round (sync.hiding)"},
    )


def steering_bytes(shards: int, fragments: int, penalty: str, adapt: bool) -> float:
    """Bytes that a rank sends to the other shards of its replica in a round: what each wishes of the next one's length,
    and parts of the two norms that a penalty takes of every fragment's update."""
    norms = 2 * fragments if penalty == "norm" else 0
    return float(ring_bytes("all_reduce", 8 * (norms + adapt * shards), shards))
