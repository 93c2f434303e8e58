"""A toy `aggregate`: what stands there already, with a note of how many rows went in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from espalier.plan.compose import Claim
from espalier.train.mechanism import Build, Mechanism
from espalier.train.seams import Filled


class WatchedSums(Filled):
    claim = Claim("watched_sums", question="aggregate", needs=frozenset({"a model"}))
    seam = "aggregate"

    def __init__(self) -> None:
        self.rows: list[int] = []

    def replacement(self, context: Build, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        def aggregate(block: Any, rows: Any, *rest: Any) -> Any:
            self.rows.append(len(rows))
            return plain(block, rows, *rest)

        return aggregate


def choose(recipe: Any, plan: Any) -> Mechanism:
    return WatchedSums()
