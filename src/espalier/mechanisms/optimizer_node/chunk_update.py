"""Update of one chunk of a layer: AdamW, or the outer optimizer of rounds, on views of its buffers.

Tensor by tensor: the same instructions as on whole tensors, so the results are theirs to the bit.
"""

from __future__ import annotations

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from espalier.mechanisms.optimizer_node.state_file import ChunkState
from espalier.optim.outer_optimizer import OuterUpdate
from espalier.plan.axes.node_layout import NodeJob


def update(job: NodeJob, buffers: ChunkState, number: int, rate: float) -> None:
    """Moves the chunk that `buffers` hold, by the gradient that is there, after `number` steps.

    `rate`: factor of AdamW's rate; of an outer optimizer that is scaled, the rate of the workers' own steps.
    """
    if job.outer is None:
        _adamw(job, buffers, number, rate)
        return
    made = OuterUpdate(buffers.master, job.outer)
    if job.outer.momentum:
        made.momentum = buffers.first
    made.apply(buffers.gradient[: buffers.master.numel()], rate)


def _adamw(job: NodeJob, buffers: ChunkState, number: int, rate: float) -> None:
    options = job.optimizer
    chunk = buffers.chunk
    assert options.learning_rate is not None
    shapes = job.layers[chunk.layer].tensors
    for decays in (True, False):
        pieces = [piece for piece in chunk.pieces if (len(shapes[piece.tensor][1]) >= 2) == decays]
        if not pieces:
            continue
        master, gradient, first, second = (
            [whole[piece.start : piece.stop] for piece in pieces]
            for whole in (buffers.master, buffers.gradient, buffers.first, buffers.second)
        )
        (adam if options.coupled else adamw)(
            master,
            gradient,
            first,
            second,
            [],
            [torch.tensor(float(number)) for _ in pieces],
            fused=True,
            amsgrad=False,
            beta1=options.betas[0],
            beta2=options.betas[1],
            lr=options.learning_rate * rate,
            weight_decay=(options.weight_decay or 0.0) if decays else 0.0,
            eps=options.epsilon,
            maximize=False,
        )
