"""The figure of a recipe's network without quantization, which a report shows next to that of the quantized one.

It is trained by the rank that reports: same seed, batches, loss, optimizer, schedule and steps, in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from espalier.graph.networks.base import placement
from espalier.mechanisms.few_bits.options import Quant
from espalier.optim import adamw, schedules
from espalier.optim.base import owned_by
from espalier.parallel.workload import Shard, to_device
from espalier.recipe import Adamw
from espalier.train.trainer import seed_step

if TYPE_CHECKING:
    from espalier.graph.run import GraphRun

MOST_FLOPS = 2e11
"""Of training, up to which the network is trained without being asked for: about ten seconds on one core."""


def plain_run(run: GraphRun) -> Any:
    """`run` without `[quant]`; None: `quant.fp32` is false, training is long, or has other mechanisms or optimizers."""
    recipe = run.recipe
    options = recipe.options(Quant)
    assert options is not None
    asked = options.fp32
    alone = set(recipe.mechanisms) == {"quant"} and run.graph.partition is None
    if asked is False or not alone or not isinstance(recipe.train.optimizer, Adamw):
        return None
    plain: Any = run.like(recipe.changed(mechanisms={}))
    flops = plain.work(plain.global_batch, "none", "fp32").model_flops * (recipe.train.steps or 0)
    return plain if asked or float(flops) <= MOST_FLOPS else None


def trained(run: Any, model: nn.Module) -> nn.Module:
    """The network of `run`, trained where `model` lies."""
    recipe = run.recipe.train
    device = placement(model)["device"]
    network: nn.Module = run.build(device, torch.float32)
    optimizer = adamw.build(recipe.optimizer, owned_by(network))
    count = run.global_batch
    with torch.random.fork_rng(), torch.enable_grad():
        for step in range(recipe.steps):
            seed_step(device, hash((recipe.seed, step, 0)) & 0x7FFF_FFFF_FFFF_FFFF)
            network.train()
            for batch in run.batches(step, Shard(0, count, count)):
                total, weight = run.loss(network, to_device(batch, device))
                (total / weight).backward()
            if recipe.clip > 0:
                nn.utils.clip_grad_norm_(network.parameters(), recipe.clip)
            optimizer.step(schedules.factor(recipe.schedule, step, recipe.steps))
            network.zero_grad()
    return network.eval()
