"""Muon: momentum whose matrices are made orthogonal before they are applied, for hidden matrices.

After Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024): Nesterov momentum, then five
quintic Newton-Schulz iterations that bring every singular value near one. The update is scaled by
sqrt(max(1, rows / columns)) so that wide and tall matrices move alike.

We deviate in two ways: the iteration runs in the parameter's own precision on CPUs and on GPUs before Ampere (bfloat16
products are slower there) and in bfloat16 on later ones; matrices of one shape go through it as one batched product.
Where tensor-parallel ranks have parts of matrices, each rank orthogonalizes its share of the whole ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from espalier.kernels import accelerator
from espalier.optim.adamw import build as build_adamw
from espalier.optim.base import MakeGroup, Optimizer, OptimizerGroup, Owned, StateKinds, Together, WithoutCompiler
from espalier.recipe import Muon
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from espalier.optim.cut_matrices import MatrixCut

LARGEST_BATCH = 2**24
"""Elements orthogonalized at once: more would gain no speed and cost five times their bytes."""

# Coefficients of the quintic p(s) = a·s + b·s³ + c·s⁵, chosen by Jordan et al. for the steepest slope at zero.
_A = 3.4445
_B = -4.7750
_C = 2.0315


def orthogonalize(matrices: Tensor, iterations: int) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: singular values end in about [0.7, 1.2].

    Args:
        matrices: [count, rows, columns], any float dtype; left unchanged.
        iterations: Newton-Schulz steps; five suffice.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    if accelerator.has_bf16(x.device):
        x = x.bfloat16()
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, polynomial, x, beta=_A)
    return (x.mT if tall else x).to(matrices.dtype)


def batches(shapes: Sequence[torch.Size], ranks: int = 1) -> list[list[int]]:
    """Which matrices are orthogonalized as one batched product: indices of each batch, in their order. Of matrices
    whose parts lie on `ranks` ranks, each rank gets as many whole ones."""
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, shape in enumerate(shapes):
        by_shape[shape].append(index)
    sizes = {shape: ranks * max(1, LARGEST_BATCH // (ranks * shape.numel())) for shape in by_shape}
    return [
        parameters[first : first + sizes[shape]]
        for shape, parameters in by_shape.items()
        for first in range(0, len(parameters), sizes[shape])
    ]


class MuonStep(torch.optim.Optimizer):
    """Muon over matrices (2-D parameters only). Has state: one momentum buffer per matrix, which its caller makes.

    A group of `parameters` may say how the matrices of which it has parts lie on the ranks: `cut`, a `MatrixCut`.
    """

    add_param_group = WithoutCompiler.add_param_group

    def __init__(self, parameters: Iterable[Any], options: Muon) -> None:
        super().__init__(parameters, {"lr": options.learning_rate, "cut": None})
        self.options = options

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        if closure is not None:
            raise UserError("step(closure) is not supported.", do="call backward first, then step()")
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            ranks = 1 if group["cut"] is None else len(group["cut"].parts)
            for batch in batches([parameter.shape for parameter in moving], ranks):
                self._move([moving[index] for index in batch], group["lr"], group["cut"])

    def _move(self, parameters: list[nn.Parameter], rate: float, cut: MatrixCut | None) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        buffers = [self.state[parameter]["momentum"] for parameter in parameters]
        momentum = self.options.momentum
        torch._foreach_lerp_(buffers, gradients, 1.0 - momentum)
        matrices = torch.stack(list(torch._foreach_lerp(gradients, buffers, momentum)))
        compute = partial(orthogonalize, iterations=self.options.iterations)
        updates = compute(matrices) if cut is None else cut.apply(matrices, compute)
        rows, columns = parameters[0].shape if cut is None else cut.shape
        weights: list[Tensor] = list(parameters)
        torch._foreach_mul_(weights, 1.0 - rate * self.options.weight_decay)
        torch._foreach_add_(weights, list(updates), alpha=-rate * max(1.0, rows / columns) ** 0.5)


def moves(parameter: Owned, tables: frozenset[str]) -> bool:
    """Whether Muon moves it: hidden matrices, not tables and heads (named in `tables`), not vectors."""
    return len(parameter.shape) == 2 and parameter.name not in tables


def build(
    options: Muon,
    owned: Sequence[Owned],
    tables: frozenset[str],
    group: MakeGroup = OptimizerGroup,
    cuts: Mapping[str, MatrixCut] = MappingProxyType({}),
) -> Together:
    """Muon on the hidden matrices in `owned`, AdamW on the rest (vectors, and the parameters named in `tables`).

    `cuts`: how the matrices lie on the ranks of which each has a part, by name.
    """
    assert options.learning_rate is not None, "config.defaults.resolve fills the learning rate"
    hidden = [parameter for parameter in owned if moves(parameter, tables)]
    others = [parameter for parameter in owned if not moves(parameter, tables)]
    assert all(parameter.whole for parameter in hidden), "composition refuses Muon on pieces of matrices"
    members: list[Optimizer] = []
    if hidden:
        groups: defaultdict[MatrixCut | None, list[nn.Parameter]] = defaultdict(list)
        for part in hidden:
            groups[cuts.get(part.name)].append(part.tensor)
        moved = MuonStep([{"params": parts, "cut": cut} for cut, parts in groups.items()], options)
        together = partial(batches, ranks=max((len(cut.parts) for cut in groups if cut is not None), default=1))
        members.append(group(moved, hidden, StateKinds(("momentum",), batches=together)))
    if others:
        members.append(build_adamw(options.adamw, others, group))
    return Together(members)
