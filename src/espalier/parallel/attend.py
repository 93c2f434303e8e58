"""How is a long sequence split? The seam `attend` of a decoder, and what it is told of the tokens at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from espalier.parallel.sequence_slots import SequenceSlots


CORES: list[Any] = []
"""Operations of attention over ranks whose outputs selective recomputation keeps, so that attention runs once
(Selective Checkpoint++). Each module that registers one adds it."""


class Where(NamedTuple):
    """Where the tokens of a forward pass stand. Models keep no position of their own.

    Attributes:
        positions: int64 [seq] or [batch, seq]; of each token in its document, which rotary embeddings turn by.
        documents: int64 [batch, seq]; equal for tokens that may see each other. None: each row is one document. With
            `slots` it is of the whole sequences, [batch, slots.length].
        slots: which tokens of a longer sequence these are, where several ranks share it; None: all of them.
        padding: int64 [batch]; how many of the first keys of each row are none of it. None: none of any row.
    """

    positions: Int[Tensor, "*batch seq"]
    documents: Int[Tensor, "batch seq"] | None = None
    slots: SequenceSlots | None = None
    padding: Int[Tensor, " batch"] | None = None


class Attend(Protocol):
    """The seam `attend`. `whole.causal` is the plain answer."""

    def __call__(
        self,
        query: Float[Tensor, "batch heads seq head"],
        key: Float[Tensor, "batch kv_heads keys head"],
        value: Float[Tensor, "batch kv_heads keys head"],
        where: Where,
        /,
    ) -> Float[Tensor, "batch heads seq head"]:
        """Causal attention. Queries and keys are turned by their positions already; the queries are the last `seq` of
        the `keys`. Heads are a multiple of `kv_heads`."""
