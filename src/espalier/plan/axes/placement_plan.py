"""Placement plan: how a model lies on the ranks, and the bytes one step of it sends.

Bytes are AMSP's (arXiv 2311.00257, section on communication cost), padding included: what the ledger shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from espalier.plan.axes.flat_layout import BUCKET, Arranged, BucketRule, Piece, arrange
from espalier.plan.axes.placement import Placement, ShardFactors
from espalier.plan.compose import Claim

if TYPE_CHECKING:
    import torch
    from torch import nn

    from espalier.plan.base import Exchange, Unit
    from espalier.store.base import WeightStore


WHOLE = Claim(
    "amsp",
    question="shard",
    needs={"a model"},
    changes={"gradients are summed", "whole matrices"},
    after={
        *("attend", "aggregate", "route", "recompute", "compile", "precision", "matrices", "tensor", "model stages"),
        "frozen weights",
    },
)
"""With every matrix on one rank."""
SPLIT = replace(WHOLE, name="amsp_split", changes={"gradients are summed"}, instead=("amsp",))
"""With matrices cut by the shards of the optimizer's state (a plan's units that are not `whole`)."""


PIPED = 2 * 2**20
"""Bytes exchanged at once where an exchange goes through machines and then between them: while one unit crosses the
network, the next is added up inside, and with several under way Gloo's all-to-alls and gathers fill the link. Four
hosts on two nodes, 200 Mbit/s and 2 ms between these, 10.8 M parameters: steps of (1, 1, 4) take 2.08 s, with 6 MiB
2.35 s."""


LOSSLESS = "split"

Prefetch = Literal["block", "attention", "none"]
"""From when on the parameters of the next block are gathered: see `mechanisms.sharding.gather_hooks`."""


@dataclass(frozen=True)
class Spread:
    """How a model is to lie on the ranks.

    Attributes:
        factors: (pattern of parameter names, factors); the first that matches counts, (1, 1, 1) where none does.
        nodes: the machine of each rank; empty: all on one.
        blocks: what is gathered at once; None: found by `blocks_of`.
        whole: names of the parameters that no shard of the optimizer's state may cut.
        low: dtype of the parameters when the optimizer is to keep masters in the dtype they have now.
        bucket_bytes: bytes of gradients exchanged at once, and at most `PIPED` where that goes machine by machine.
        codecs: by class of traffic and level (`inside` a machine or `between`), as `comm.codecs.codec` reads them.
            Parameters are not rounded: a lossy codec becomes `LOSSLESS`, as no rank keeps them in full precision.
        prefetch: from when on the parameters of the next block are gathered.
        weights: what keeps frozen weights of blocks in host memory; None: they are on the device.
    """

    factors: Sequence[tuple[str, ShardFactors]] = (("*", ShardFactors()),)
    nodes: Sequence[int] = ()
    blocks: Sequence[nn.Module] | None = None
    whole: frozenset[str] = frozenset()
    low: torch.dtype | None = None
    bucket_bytes: int = BUCKET
    codecs: Mapping[tuple[str, str], str] = field(default_factory=dict)
    prefetch: Prefetch = "block"
    weights: WeightStore | None = None

    def of(self, name: str) -> ShardFactors:
        """The factors of a parameter."""
        return next((factors for pattern, factors in self.factors if fnmatchcase(name, pattern)), ShardFactors())


def factors(units: Iterable[Unit]) -> list[tuple[str, ShardFactors]]:
    """The factors that a plan's units ask for, by pattern of names."""
    return [
        (unit.pattern, ShardFactors(*(len(ranks) or 1 for ranks in (unit.params, unit.grads, unit.optimizer))))
        for unit in units
    ]


def codecs(exchanges: Iterable[Exchange], strict: bool = False) -> dict[tuple[str, str], str]:
    """The codecs that a plan's exchanges ask for, by class and level; `strict`: ones that stop at NaN."""
    return {
        (exchange.traffic, level): exchange.codec.removesuffix("!") + "!" if strict else exchange.codec
        for exchange in exchanges
        for level in (("inside", "between") if exchange.level == "all" else (exchange.level,))
        if exchange.codec != "exact"
    }


def claim(units: Iterable[Unit]) -> Claim:
    """What the units of a plan bring."""
    units = tuple(units)
    optimizer_claim = SPLIT if any(len(unit.optimizer) > 1 and not unit.whole for unit in units) else WHOLE
    cut = any(len(ranks) > 1 for unit in units for ranks in (unit.params, unit.grads, unit.optimizer))
    gathered = {"parameters are gathered"} if any(len(unit.params) > 1 for unit in units) else set()
    scattered = {"gradients are scattered"} if any(len(unit.grads) > 1 for unit in units) else set()
    return (
        replace(optimizer_claim, changes=optimizer_claim.changes | {"states are cut"} | gathered | scattered)
        if cut
        else optimizer_claim
    )


class ParameterGroup(NamedTuple):
    """Parameters that may share a unit: of one placement, kind and (where they are gathered) block.

    `gathered`: None where parameters are not sharded, else the block (None outside) and how many blocks came before.
    """

    factors: ShardFactors
    gathered: tuple[int | None, int] | None = None
    kind: Any = None


def groups(
    chosen: Sequence[ShardFactors], blocks: Sequence[int | None], kinds: Sequence[Any], fetched: bool = False
) -> list[ParameterGroup]:
    """The group of each parameter, in the model's order. `fetched`: blocks come one by one, sharded or not."""
    parameter_groups = []
    before = 0
    for factors, block, kind in zip(chosen, blocks, kinds, strict=True):
        before = before if block is None else block + 1
        parameter_groups.append(
            ParameterGroup(factors, None if factors.params == 1 and not fetched else (block, before), kind)
        )
    return parameter_groups


def units(
    pieces: Sequence[Piece], placements: dict[ShardFactors, Placement], bucket_bytes: int = BUCKET
) -> list[Arranged]:
    """The units of `pieces`, whose `group` is a `ParameterGroup`."""

    def rule(group: Any) -> BucketRule:
        placement = placements[group.factors]
        limit = min(bucket_bytes, PIPED) if placement.by_level else bucket_bytes
        return BucketRule(placement.multiple, group.factors.optimizer, limit if group.gathered is None else 0)

    return arrange(pieces, rule)


# --- the sum that steers a step ----------------------------------------------------------------------------------


EXACT_BITS = 53
"""Integers of so many bits are exact in float64."""


def flags_per_value(ranks: Any) -> Any:
    """How many counts of at most `ranks` fit into one float64, as digits to the base `ranks + 1`."""
    return np.floor(EXACT_BITS / np.log2(np.asarray(ranks) + 1)).astype(np.int64)


def control_values(tensors: Any, ranks: Any, totals: Any) -> Any:
    """float64 values that are summed at every step, for so many trainable `tensors` (NumPy arrays allowed)."""
    return totals + 1 + -(-np.asarray(tensors) // flags_per_value(ranks))
