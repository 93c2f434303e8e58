"""Small decoders cut over ranks, and one step of them."""

from __future__ import annotations

from typing import Any

import torch
from regular_mesh import ParallelDegrees, regular
from torch import Tensor

from espalier.comm import Channel
from espalier.language.decoder_workload import new_model
from espalier.language.gpt import GPT, recompute, roles
from espalier.mechanisms.tensor_parallel.cut import cut_model
from espalier.mechanisms.tensor_parallel.stream import Stream
from espalier.parallel.mesh import ProcessMesh
from espalier.parallel.model_cut import ModelCut
from espalier.recipe import Gpt, Moe

SEED = 5


def options(**changes: Any) -> Gpt | Moe:
    """Sizes that few numbers divide: 23 words, 26 columns of the feed-forward."""
    given: dict[str, Any] = {
        "depth": 2, "width": 24, "heads": 4, "kv_heads": 2, "feed_forward": 26, "vocabulary": 23, "context": 16,
        "tied": False, "rope_theta": 1e4, "norm_epsilon": 1e-5, **changes,
    }  # fmt: skip
    return Moe(**given) if "experts" in given else Gpt(**given)


def whole(**changes: Any) -> GPT:
    """The decoder of one rank, in float64; norms and biases are no defaults."""
    model = new_model(options(**changes), SEED, torch.device("cpu")).double()
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


def batch(samples: int = 3, sequence: int = 7) -> tuple[Tensor, Tensor]:
    """Tokens and targets, one of which does not count."""
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 23, (samples, sequence + 1), generator=draw)
    targets = tokens[:, 1:].clone()
    targets[0, 2] = -100
    return tokens[:, :-1], targets


def cut(channel: Channel, regather: bool, mode: str, **changes: Any) -> tuple[GPT, ModelCut]:
    """This rank's part."""
    mesh = ProcessMesh(regular(ParallelDegrees(tp=channel.size())), channel, channel.rank())
    model, found = whole(**changes), ModelCut(channel)
    recompute(model, mode)
    cut_model(model, roles(model), Stream(mesh.group("tp"), True, regather), mesh, found)
    return model, found


def slab(value: Tensor, name: str, part: Tensor, found: ModelCut) -> Tensor:
    """What of the whole `value` lies where this rank's `part` does."""
    if name not in found.slabs:
        return value
    ends = zip(found.slabs[name].offsets, part.shape, strict=True)
    return value[tuple(slice(first, first + size) for first, size in ends)]
