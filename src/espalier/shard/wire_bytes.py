"""Bytes that a step of one layout sends through codecs, headers included, unit by unit as the engine encodes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from espalier.comm import compressed_collectives
from espalier.comm.codecs import codec
from espalier.comm.hierarchical_all_reduce import level
from espalier.cost import ring_bytes
from espalier.shard.cost import GRADIENTS, PARAMETERS, StateSizes, lengths, placed
from espalier.shard.placement import ShardFactors
from espalier.shard.placement_plan import LOSSLESS

Codecs = Mapping[tuple[str, str], str]
"""Names of codecs by class of traffic and level, as in `shard.placement_plan.Spread`."""


def wire_bytes(
    states: StateSizes, chosen: ShardFactors, nodes: Sequence[int], codecs: Codecs, *, rounds: int = 1
) -> dict[str, float]:
    """Bytes sent in a step by the first rank, which sends most, through `codecs`, headers included: exact for codecs of
    fixed length and finite values, else at most that.

    Args:
        states: with `sizes`; chosen: the factors of one layout; nodes: the machine of each rank.
        codecs: as in `Spread`.
        rounds: micro-batches of the step.
    """
    placement, rules = placed(chosen, nodes, states.whole, states.bucket_bytes)
    sent = {GRADIENTS: 0.0, PARAMETERS: 0.0}
    for units in lengths(tuple(states.sizes), states.whole).of(rules):
        storage = states.storage if units.low or states.exact is None else states.exact
        storage = storage.times(units.element_bytes / states.width)
        before = units.lengths
        for index, axis in enumerate(placement.axes):
            where = level(nodes, axis.members(0))
            sums = _Way(codecs.get((GRADIENTS, where)), axis.size, float(storage.grads))
            replicas = axis.state == "replicas"
            kind = GRADIENTS if replicas else PARAMETERS
            back = _Way(codecs.get((kind, where)), axis.size, float(storage.grads if replicas else storage.params))
            if replicas and index == len(placement.axes) - 1:
                sent[GRADIENTS] += float(sums.sent("all_reduce", before).sum())
            else:
                once = axis.state in ("optimizer", "replicas")
                sent[GRADIENTS] += (1 if once else rounds) * float(sums.sent("reduce_scatter", before).sum())
                times = rounds * (2 - units.stays) if axis.state == "params" else 1
                sent[kind] += float((times * back.exact.sent("all_gather", before)).sum())
            before = before // axis.size
    return sent


class _Way(NamedTuple):
    """How one axis is sent along: by a codec, to so many ranks, values of so many bytes."""

    name: str | None
    ranks: int
    width: float

    @property
    def exact(self) -> _Way:
        """The same without rounding."""
        lossy = self.name is not None and not codec(self.name).lossless
        return self._replace(name=LOSSLESS) if lossy else self

    def sent(self, operation: str, elements: Any) -> Any:
        """Bytes of tensors of so many elements; small ones go as they are."""
        plain = ring_bytes(operation, elements * self.width, self.ranks)
        if self.name is None:
            return plain
        chosen = codec(self.name)
        found = compressed_collectives.sent_bytes(chosen, operation, elements, (0, self.ranks), int(self.width))
        return np.where(elements * self.width < compressed_collectives.SMALL, plain, found)
