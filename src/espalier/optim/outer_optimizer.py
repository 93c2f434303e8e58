"""Outer optimizer of one fragment: momentum, clip and staleness penalty over flat tensors. Knows no ranks.

After CO2, arXiv 2401.16265, algorithm 1; SlowMo, 1910.00643; DiLoCo, 2311.08105. The penalty's normaliser is not
published: here it is that of gap-aware staleness mitigation (Barkai, Hakimi, Schuster, ICLR 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from espalier.optim.base import StateDict
from espalier.optim.diloco_slowmo import OuterMethod
from espalier.recipe.errors import UserError

Sum = Callable[[Tensor], Tensor]
"""Adds a small tensor over the ranks that hold the other shards of a replica, in place; returns it."""


class OuterUpdate:
    """Moves outer parameters. Has state: the momentum, the last update (`gap`) or how far it moved, and the penalty's
    scale C.

    With D the mean difference of the replicas to the outer parameters (divided by the inner learning rate g where
    `scaled`): m <- b m + D / L; x <- x - a g clip(m), with b m + D / L in the place of m where `nesterov`.

    The penalty L is 1 for `none`; `norm`: 1 + |x_t - x_(t-1)| / C, C the largest |D| so far (before division by g);
    `per_tensor`: the same of every tensor by itself; `constant`: the constant.

    With `gap`: m <- b m + (1 - b) D and x <- x - a g clip(D - b ((x_(t-1) - x_t) / (a g) - m)). D departed at x_(t-1).
    Of what x has moved since, a move as the mean of differences foresees stays, and the share b of all else is taken
    back. Along a direction of which a round goes the share c, late D alone has roots of size sqrt(c), which swing for c
    near 1; with b = 0.8 none is above 0.82 for c from 0.3 to 1.3, and D that stays the same moves x as far.

    Args:
        x: [n] the outer parameters, changed in place.
        choices: see there.
        cuts: where tensors begin in x, and the end.
        total: for norms over all shards of a replica; default: x is whole.
    """

    def __init__(self, x: Tensor, choices: OuterMethod, cuts: Sequence[int] = (), total: Sum | None = None) -> None:
        self.x = x
        self.choices = choices
        self.cuts = [0, x.numel()] if choices.penalty != "per_tensor" else list(cuts)
        self.total: Sum = total or (lambda values: values)
        self.momentum = torch.zeros_like(x) if choices.momentum else None
        self.moved = torch.zeros(len(self.cuts) - 1, dtype=torch.float64)
        self.scale = torch.zeros_like(self.moved)
        self.last = torch.zeros_like(x) if choices.penalty == "gap" else None

    def apply(self, difference: Tensor, rate: float, late: bool = True) -> Tensor:
        """One update by the mean `difference` [n], which is overwritten; `rate`: the inner learning rate; `late`:
        whether x has moved since the difference departed.

        Returns the penalty L by tensor (one number unless `per_tensor`).
        """
        choices = self.choices
        gap = self._gap(difference)
        if choices.scaled:
            difference.div_(rate)
        self._divide(difference, gap)
        factor = choices.rate * (rate if choices.scaled else 1.0)
        behind = factor * late
        step = difference
        if self.last is not None:
            self._close_gap(self.last, difference, behind)
        elif self.momentum is not None:
            self.momentum.mul_(choices.momentum).add_(difference)
            step = difference.add_(self.momentum, alpha=choices.momentum) if choices.nesterov else self.momentum
        if choices.clip:
            step = step.clamp(-choices.clip, choices.clip)
        self.x.sub_(step, alpha=factor)
        if self.last is not None:
            self.last.copy_(step).mul_(behind)
        if choices.penalty in ("norm", "per_tensor"):
            self.moved = self._norms(step) * behind
        return gap

    def _close_gap(self, last: Tensor, difference: Tensor, factor: float) -> None:
        """See the class; `factor` 0: x has not moved."""
        share = self.choices.momentum
        if self.momentum is not None:
            self.momentum.lerp_(difference, 1 - share)
            if factor:
                difference.sub_(last, alpha=share / factor).add_(self.momentum, alpha=share)

    def _gap(self, difference: Tensor) -> Tensor:
        if self.choices.penalty in ("none", "gap"):
            return torch.ones(1, dtype=torch.float64)
        if self.choices.penalty == "constant":
            return torch.tensor([self.choices.constant], dtype=torch.float64)
        self.scale = torch.maximum(self.scale, self._norms(difference))
        return 1 + torch.where(self.scale > 0, self.moved / self.scale, 0.0)

    def _divide(self, difference: Tensor, gap: Tensor) -> None:
        if self.choices.penalty in ("none", "gap"):
            return
        if len(gap) == 1:
            difference.div_(float(gap))
            return
        for part, divisor in zip(self._parts(difference), gap.tolist(), strict=True):
            part.div_(divisor)

    def _norms(self, values: Tensor) -> Tensor:
        squares = torch.stack([part.double().square().sum() for part in self._parts(values)]).cpu()
        return self.total(squares).sqrt()

    def _parts(self, values: Tensor) -> list[Tensor]:
        return [values[a:b] for a, b in zip(self.cuts, self.cuts[1:], strict=False)]

    def state_dict(self) -> StateDict:
        """Everything but x."""
        tensors = {"moved": self.moved, "scale": self.scale, "momentum": self.momentum, "last": self.last}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def load_state_dict(self, state: StateDict) -> None:
        """Raises UserError where the state is of another penalty."""
        for name, tensor in self.state_dict().items():
            if name not in state:
                raise UserError(
                    f"This checkpoint's rounds were not made with sync.penalty = {self.choices.penalty!r}.",
                    why=f"it has no {name!r} of the outer optimizer",
                    do="a new run, or the penalty that it was made with",
                )
            tensor.copy_(state[name])
