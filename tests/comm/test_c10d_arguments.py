"""What a Channel is given: a residual lies where its tensor is encoded. (Tensors without values stand for a GPU's.)"""

from __future__ import annotations

import pytest
import torch

from espalier.comm.c10d_arguments import residual_like
from espalier.comm.codecs import codec
from espalier.mechanisms.codecs.lowbit import Lowbit


class There(Lowbit):
    """int8 with kernels for a device without memory."""

    def runs_on(self, device: str) -> bool:
        return device == "meta"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_residual_lies_where_its_tensor_is_encoded(dtype: torch.dtype) -> None:
    tensor = torch.empty(3, 5, dtype=dtype, device="meta")
    host, there = codec("topk:0.01"), There(8)
    assert residual_like(tensor, [there]).device == tensor.device
    assert residual_like(tensor, [host, there]).device == tensor.device
    kept = residual_like(tensor, [host])
    assert kept.device.type == "cpu"
    assert kept.shape == (15,)
    assert kept.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not kept.any()
    assert residual_like(torch.empty(2), [host, there]).device.type == "cpu"
