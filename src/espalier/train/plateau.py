"""Has the loss stopped falling where that is not to be expected? Pure, no torch.

After Acme (arXiv 2403.07648), section 6.1, where people stop runs whose loss does not move. A plateau asks for another
learning rate or other data, which is for a person to choose, so it is only reported. The test: a line through the block
medians of a window, and its slope's standard error from their scatter round it. A plateau is when the fall over the
window is less than a hundredth of the loss with three standard errors to spare, and not significant either: noise that
could hide a fall is never called a plateau, and neither is a small fall that noise does not hide.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

BLOCKS = 20
LEAST = 10 * BLOCKS
"""Steps of the shortest window."""
MARGIN = 0.01
"""Of the loss: a fall over the window that is worth waiting for."""
CERTAIN, FALLING = 3.0, 2.0
"""Standard errors: between the fall and the margin; that a fall must have to be one."""
LASTING = 4
"""Blocks in a row after which it is reported."""


@dataclass(frozen=True)
class Fall:
    """How far the loss fell over a window by the line through it: from `level`, with its standard error."""

    level: float
    fall: float
    error: float

    @property
    def flat(self) -> bool:
        """Whether that is a plateau."""
        small = self.fall + CERTAIN * self.error < MARGIN * abs(self.level)
        return small and self.fall <= FALLING * self.error

    @property
    def falls(self) -> bool:
        """Whether it surely falls, and not by a trifle."""
        return self.fall > max(CERTAIN * self.error, MARGIN * abs(self.level))


def fall(blocks: list[float]) -> Fall:
    """The fall from the first block to the last by least squares; the error is of the slope, times their distance."""
    count = len(blocks)
    line = statistics.linear_regression(range(count), blocks)
    rest = [value - line.intercept - line.slope * at for at, value in enumerate(blocks)]
    scatter = math.sqrt(sum(distance * distance for distance in rest) / (count - 2))
    error = scatter / math.sqrt(sum((at - (count - 1) / 2) ** 2 for at in range(count)))
    return Fall(statistics.fmean(blocks), -line.slope * (count - 1), error * (count - 1))


class Plateau:
    """Takes the loss of each step. Has state: the blocks of the window, and whether this plateau was reported.

    Args:
        window: steps in which a loss should fall visibly, at least `LEAST`.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._block: list[float] = []
        self._blocks: deque[float] = deque(maxlen=BLOCKS)
        self._flat = 0
        self._reported = False

    def take(self, loss: float, judged: bool = True) -> Fall | None:
        """The plateau, once for each. `judged`: whether a fall is to be expected at this step; where not, the window
        begins anew."""
        if not judged:
            self._block.clear()
            self._blocks.clear()
            self._flat = 0
            return None
        self._block.append(loss)
        if len(self._block) < self.window // BLOCKS:
            return None
        self._blocks.append(statistics.median(self._block))
        self._block.clear()
        if len(self._blocks) < BLOCKS or not all(map(math.isfinite, self._blocks)):
            return None
        line = fall([*self._blocks])
        self._flat = self._flat + 1 if line.flat else 0
        self._reported = self._reported and not line.falls
        if self._flat < LASTING or self._reported:
            return None
        self._reported = True
        return line
