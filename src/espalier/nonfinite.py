"""Whose batch was it? Finds the ranks where a loss or gradient is not a finite number, and the documents behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from espalier.errors import Anomaly
from espalier.healing import numbered
from espalier.parallel.mesh import REPLICA
from espalier.stages import whole
from espalier.sync.base import Agreed
from espalier.workload import Shard

if TYPE_CHECKING:
    from espalier.trainer import Trainer


def explained(trainer: Trainer, agreed: Agreed, batches: Sequence[Any]) -> Anomaly:
    """The error of the step after `trainer.step`, in which nothing was updated. All ranks call it."""
    faulty, what = agreed.faulty, "loss"
    setting, workload = trainer.setting, trainer.workload
    if not faulty:
        faulty, what = _ranks_with_bad_gradients(trainer, batches), "gradient"
    replica = setting.mesh.members(setting.place.rank, *REPLICA)
    faulty = tuple(replica[rank] for rank in faulty)
    start, stop = setting.plan.ranks[faulty[0]].share if faulty else (0, workload.global_batch)
    number = numbered(trainer.healing, trainer.step)
    if trainer.healing is not None:
        trainer.healing.not_finite(trainer.step)
    names = workload.documents(number, Shard(start, stop, setting.plan.micro_batch))
    shown = ", ".join(list(dict.fromkeys(names))[:5])
    who = f"rank {', '.join(map(str, faulty))}" if faulty else "the sum over ranks"
    return Anomaly(
        f"The {what} is not finite in step {trainer.step + 1} on {who}.",
        why=f"that batch came from {shown}",
        do="lower the learning rate, look at those documents, or resume from the last checkpoint with another rate",
    )


def _ranks_with_bad_gradients(trainer: Trainer, batches: Sequence[Any]) -> tuple[int, ...]:
    built = trainer.built
    built.sharding.clear()
    shares = tuple(trainer.workload.tasks().values())
    nominal = trainer.workload.nominal_weight
    apart = whole.Whole(nominal, lambda last: built.sharding.alone(), trainer.context, shares)
    apart.run(built.model, batches, trainer.workload.loss)
    norm = torch.nn.utils.get_total_norm([p.grad for p in built.model.parameters() if p.grad is not None])
    group = trainer.mesh.replica
    flags = torch.zeros(1 if group is None else group.size())
    flags[0 if group is None else group.rank()] = float(not torch.isfinite(norm))
    trainer.sum(flags, group)
    return tuple(int(rank) for rank in flags.nonzero().flatten())
