"""How does a token reach its expert? A Route takes tokens whose experts are chosen, and brings back what these say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor, nn


class Route(Protocol):
    """The seam `route` of a mixture of experts: dispatch, the experts' own work, combine. `local` is the plain answer.

    No token is dropped (no capacity), and no gradient is missing: an expert that no token chose gets zeros.
    """

    def __call__(
        self,
        x: Float[Tensor, "tokens width"],
        chosen: Int[Tensor, "tokens active"],
        weights: Float[Tensor, "tokens active"],
        experts: Sequence[nn.Module],
    ) -> Float[Tensor, "tokens width"]:
        """Sum over a token's `chosen` experts of weight times expert(token), in x's dtype.

        `experts` maps rows `[rows, width]` to rows; with expert parallelism, those that this rank holds.
        """
        ...
