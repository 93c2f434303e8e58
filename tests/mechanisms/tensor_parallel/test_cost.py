"""What the formulas say of shared matrices is what the ledger and the saved tensors say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from decoders import cut, options
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from espalier.comm import Channel
from espalier.language import gpt
from espalier.language.operation_counts import DecoderLoad
from espalier.plan.axes.tensor import TensorLoad, cost, of_layer
from espalier.recipe.cost import Cut
from espalier.recipe.decoder_shapes import sizes
from many_ranks.ranks import ranks

SIZES = {"width": 32, "heads": 8, "kv_heads": 4, "feed_forward": 64, "vocabulary": 32}
SAMPLES, SEQUENCE = 2, 16


def step(channel: Channel, regather: bool, mode: str, changes: dict[str, Any]) -> tuple[float, float]:
    """Bytes sent in forward and backward, and kept between them."""
    model, _ = cut(channel, regather, mode, **changes)
    draw = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(0, 32, (2, SAMPLES, SEQUENCE), generator=draw)
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    own |= {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}

    def save(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        loss = model.loss_sum(tokens, targets)
    loss.backward()
    return channel.ledger.by_class()["activations"], float(sum(kept.values()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", ["none", "selective", "block"])
@pytest.mark.parametrize("regather", [False, True])
def test_bytes_on_the_ledger_are_the_formula_s(world: int, mode: str, regather: bool) -> None:
    load = TensorLoad(
        SAMPLES * SEQUENCE, 32, 8, 8, layers=2, ranks=world, again=float(mode != "none"), regather=regather
    )
    wanted = cost(load).sent["activations"]
    for sent, _ in ranks(world, step, regather, mode, SIZES):
        assert sent == wanted


@pytest.mark.parametrize("regather", [False, True])
def test_bytes_kept_by_a_layer_are_within_5_per_cent_of_the_plan_s(regather: bool) -> None:
    shallow, deep = (
        ranks(4, step, regather, "none", {**SIZES, "depth": depth})[1][1] for depth in (1, 3)
    )  # fmt: skip
    shape = sizes(options(**SIZES))
    load = DecoderLoad(shape, SEQUENCE, SAMPLES, "none", "fp64", Cut(tensor=4, gathered=not regather))
    assert (deep - shallow) / 2 == pytest.approx(gpt.work(load).layer.saved, rel=0.05)


def test_a_layer_has_the_published_number_of_transfers() -> None:
    """MSP 4 (1 + r) + 4 and FSP 4 (1 + r) + 6 where recomputation repeats all four; one all-reduce stands for two."""
    again = np.array([0, 1, 0, 1])
    regather = np.array([False, False, True, True])
    found = of_layer(again, regather, repeated=4)
    assert (found.gathers + found.scatters).tolist() == [8, 12, 10, 14]
    ours = of_layer(again, regather)
    assert (ours.gathers + ours.scatters).tolist() == [8, 11, 10, 13]
    assert of_layer(again, False, sharded=False, repeated=4).reductions.tolist() == [4, 6, 4, 6]
