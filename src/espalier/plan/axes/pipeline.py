"""What a pipeline costs: idle time, hand-overs, bytes sent and activations kept, of many layouts in one call. NumPy; no
torch.

Idle time is that of the timetable (`action_list.timetable`) for equal stages. Where ranks share cores, those that
compute have the cores of those that wait. Hand-overs on the critical path as in Buff (arXiv 2401.09149, section on
communication cost).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.recipe.cost import Cost, Number

NESTED_IN_FLIGHT = 2
"""Nested micro-batches of waves whose activations a rank keeps at most (`mechanisms.task_waves.wave_schedule`)."""


@dataclass(frozen=True)
class PipelineLoad:
    """A step of a pipeline of equal stages. Arrays allowed.

    Attributes:
        ranks: from the first stage to the last, those of one stage counted once; chunks: stages on each rank.
        micro_batches: of the step.
        seconds: forward and backward of one micro-batch in all stages of a rank; of it `weights` can be put off.
        message: seconds of one hand-over; message_bytes: its payload; away_bytes: of one that leaves a machine.
        split: whether gradients of weights are put off (zero bubble).
        ahead: whether stages begin with more forward passes where links are slow (`schedules.warm_up_for_links`).
        share: of a core's speed that a rank has while all compute; together: stages whose ranks share cores.
    """

    ranks: Number
    micro_batches: Number
    chunks: Number = 1
    seconds: Number = 0.0
    weights: Number = 0.0
    message: Number = 0.0
    message_bytes: Number = 0.0
    away_bytes: Number | None = None
    split: Any = False
    ahead: bool = False
    share: Number = 1.0
    together: Number = 1


def cost(load: PipelineLoad) -> Cost:
    """`pipeline`: seconds without work; `send`: seconds of hand-overs; `activations`: bytes of the rank that sends most
    of them (gradients of activations too)."""
    ranks = load.ranks
    several = ranks > 1
    put_off = np.where(load.split, 2 * load.weights, 0.0)
    idle = waits(load) * np.maximum(0.0, load.seconds - put_off) / load.chunks
    ahead = load.ahead & (load.chunks == 1)
    times = hand_overs(ranks, load.micro_batches, ahead) * load.chunks * several
    # Each way the link carries a message for each micro-batch, and one may take longer than its passes.
    late = np.where(ahead, (load.micro_batches - 1) * np.maximum(0.0, load.message - load.seconds), 0.0)
    # A rank sends for each of its stages forward and back, but for the first and the last stage of all.
    messages = (2 * load.chunks - (ranks == 2)) * several
    near = np.minimum(messages, np.clip(load.together - 1, 0, 2) * load.chunks)
    away = load.message_bytes if load.away_bytes is None else load.away_bytes
    return Cost(
        seconds={"pipeline": idle, "send": times * load.message + several * late},
        sent={"activations": load.micro_batches * (near * load.message_bytes + (messages - near) * away)},
    )


def waits(load: PipelineLoad) -> Number:
    """Micro-batches for whose time a rank has no work, in 1F1B: the first ones until they come to it, the last ones
    until they come back. Ranks that share cores are slowed down by the others' work only."""
    ranks = load.ranks
    count = load.micro_batches
    alone = (count + ranks - 1) * load.share  # the longest chain of passes, with cores of its own
    shared = count + (ranks - load.together) * load.share  # all work of the cores that begin last
    return np.maximum(0.0, np.maximum(alone, shared) - count)


def hand_overs(ranks: Number, micro_batches: Number, ahead: Any = False) -> Number:
    """Transfers on the critical path of 1F1B. With more forward passes `ahead`, those in between are hidden, and the
    pipeline waits for messages while it fills and drains."""
    every = np.minimum(ranks, micro_batches) + (micro_batches - 1) + np.minimum(ranks, micro_batches)
    return np.where(ahead, np.minimum(every, 2 * (ranks - 1)), every)


def most_in_flight(ranks: Number, chunks: Number = 1) -> Number:
    """Micro-batches whose activations the first rank keeps at once, each of all its stages; the last keeps one."""
    return np.where(chunks > 1, ranks + (ranks - 1) / chunks, ranks)
