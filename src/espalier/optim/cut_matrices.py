"""Cut matrices: an optimizer of whole matrices over ranks of which each has some rows or columns of every matrix.

The ranks of a tensor-parallel group take the matrices of one shape in turn: an all-to-all brings each its whole ones,
a second one brings the results back to the parts. Each rank computes its share of the matrices, as the owners of a
distributed Muon do (Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982, gather every matrix instead).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from espalier.comm.base import Traffic, traffic


class MatrixCut(NamedTuple):
    """How a matrix lies on the ranks of a group.

    Attributes:
        shape: of the whole matrix.
        dim: the dimension that is cut.
        parts: `[first, last)` along it of each rank, in the order of the ranks; several may have the same.
        group: the ranks.
    """

    shape: torch.Size
    dim: int
    parts: tuple[tuple[int, int], ...]
    group: dist.ProcessGroup

    def apply(self, parts: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """`compute` of whole matrices.

        Args:
            parts: [count, rows, columns], this rank's part of each matrix.
            compute: takes and gives [matrices, *shape]; called once, perhaps with none.

        Returns:
            This rank's part of each result.
        """
        rank = self.group.rank()
        ranks = self.group.size()
        each = self.shape[1 - self.dim]
        lengths = [last - first for first, last in self.parts]
        counts = [len(taken) for taken in torch.arange(len(parts)).tensor_split(ranks)]
        rows = parts.movedim(self.dim + 1, 1).reshape(len(parts), -1)
        leaving = [count * lengths[rank] * each for count in counts]
        arriving = [counts[rank] * length * each for length in lengths]
        received = self._exchanged(rows.flatten(), leaving, arriving)
        whole = rows.new_empty(counts[rank], self.shape[self.dim], each)
        for (first, last), block in zip(self.parts, received.split(arriving), strict=True):
            whole[:, first:last] = block.view(counts[rank], last - first, each)
        del received, block
        result = compute(whole.movedim(1, self.dim + 1)).movedim(self.dim + 1, 1)
        back = [result[:, first:last].flatten() for first, last in self.parts]
        returned = self._exchanged(torch.cat(back), arriving, leaving)
        return returned.view(len(parts), lengths[rank], each).movedim(1, self.dim + 1)

    def _exchanged(self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int]) -> Tensor:
        received = values.new_empty(sum(arriving))
        with traffic(Traffic.PARAMETERS):
            dist.all_to_all_single(received, values, list(arriving), list(leaving), group=self.group)
        return received
