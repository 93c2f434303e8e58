"""AdamW (torch's own, fused): the plain answer. After Loshchilov and Hutter, arXiv 1711.05101. With `coupled` Adam with
L2, as graph networks are trained (Kingma and Ba, arXiv 1412.6980; GCN, arXiv 1609.02907, section 5.2).

Matrices decay, vectors (norms, biases) do not, as in GPT-3 (arXiv 2005.14165).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from espalier.optim.base import MakeGroup, Optimizer, OptimizerGroup, Owned, StateKinds, Together, WithoutCompiler
from espalier.recipe import Adamw

KINDS = StateKinds(("exp_avg", "exp_avg_sq"), ("step",))


class AdamStep(WithoutCompiler, torch.optim.Adam):
    """torch's."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamwStep(WithoutCompiler, torch.optim.AdamW):
    """torch's."""

    step = AdamStep.step


def build(options: Adamw, owned: Sequence[Owned], group: MakeGroup = OptimizerGroup) -> Optimizer:
    """AdamW over `owned`; its state exists from the start, where `group` keeps it. `learning_rate` must be resolved."""
    if not owned:
        return Together([])  # more ranks than pieces: this one has nothing to move
    assert options.learning_rate is not None, "config.defaults.resolve fills the learning rate"
    assert options.weight_decay is not None, "config.defaults.resolve fills the weight decay"
    groups = [
        {
            "params": [parameter.tensor for parameter in owned if len(parameter.shape) >= 2],
            "weight_decay": options.weight_decay,
        },
        {"params": [parameter.tensor for parameter in owned if len(parameter.shape) < 2], "weight_decay": 0.0},
    ]
    kind = AdamStep if options.coupled else AdamwStep
    optimizer = kind(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.epsilon,
        fused=True,
    )
    return group(optimizer, owned, KINDS)
