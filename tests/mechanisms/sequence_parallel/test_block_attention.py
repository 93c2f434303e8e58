"""Attention on one block of keys: the fused form equals the plain one, and blocks add up to the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.merge import merge
from espalier.mechanisms.sequence_parallel import SequenceSlots, attend
from espalier.mechanisms.sequence_parallel.block_attention import (
    Saved,
    block_attention,
    block_attention_backward,
    flash_cpu,
    flash_cpu_backward,
    flash_cuda,
    flash_cuda_backward,
)

plain, plain_backward = block_attention.reference.run, block_attention_backward.reference.run


def inputs(queries: int, keys: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8), (2, 6, queries, 8))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_the_fused_form_is_the_plain_one(causal: bool, kv_heads: int, dtype: torch.dtype, bound: float) -> None:
    query, key, value, gradient = inputs(17, 17 if causal else 23, kv_heads, dtype)
    right = plain(query, key, value, causal)
    found = flash_cpu(query, key, value, causal)
    saved = Saved(query, key, value, *right)
    ours = (*found, *flash_cpu_backward(gradient, saved, causal))
    for one, other in zip(ours, (*right, *plain_backward(gradient, saved, causal)), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=bound)


def test_the_plain_one_is_pytorchs_attention_and_its_gradients_those_of_autograd() -> None:
    query, key, value, gradient = inputs(9, 9, 2)
    leaves = [one.requires_grad_() for one in (query, key, value)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    right = torch.autograd.grad(out, leaves, gradient)
    with torch.no_grad():
        found, lse = plain(query, key, value, True)
        backward = plain_backward(gradient, Saved(query, key, value, found, lse), True)
    for one, other in zip((found, *backward), (out, *right), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_blocks_of_keys_add_up() -> None:
    query, key, value, gradient = inputs(8, 30, 2)
    out, lse = plain(query, key, value, False)
    right = plain_backward(gradient, Saved(query, key, value, out, lse), False)
    merged, sums = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    blocks = list(zip(key.split([7, 22, 1], 2), value.split([7, 22, 1], 2), strict=True))
    for one in blocks:
        merge(merged, sums, *block_attention(query, *one, False))
    found = [block_attention_backward(gradient, Saved(query, *one, merged, sums), False) for one in blocks]
    of_query, of_key, of_value = zip(*found, strict=True)
    for one, other in zip(
        (merged, sum(of_query), torch.cat(of_key, 2), torch.cat(of_value, 2)), (out, *right), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_the_forms_for_gpus_fit_the_signatures_of_pytorch() -> None:
    """On the meta device, which knows shapes only."""
    query, key, value, gradient = (one.to("meta") for one in inputs(16, 24, 2, torch.bfloat16))
    out, lse = flash_cuda(query, key, value, False)
    assert (out.shape, lse.shape, lse.dtype) == (query.shape, query.shape[:3], torch.float32)
    found = flash_cuda_backward(gradient, Saved(query, key, value, out, lse), False)
    assert [one.shape for one in found] == [query.shape, key.shape, value.shape]


def test_under_autocast_it_computes_as_pytorchs_attention_does() -> None:
    query, key, value, _ = inputs(12, 12, 6, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        right = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found = attend(query, key, value, causal=True, slots=SequenceSlots(12))
    assert found.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(found, right, rtol=0, atol=1e-2)


def test_documents_that_were_changed_are_looked_at_anew() -> None:
    query, key, value, _ = inputs(12, 12, 6)
    documents, slots = torch.zeros(2, 12, dtype=torch.long), SequenceSlots(12)
    whole = attend(query, key, value, causal=True, slots=slots, documents=documents)
    documents[:, 6:] = 1
    halves = attend(query, key, value, causal=True, slots=slots, documents=documents)
    torch.testing.assert_close(halves[:, :, :6], whole[:, :, :6], rtol=0, atol=1e-13)
    apart = attend(*(one[:, :, 6:] for one in (query, key, value)), causal=True, slots=SequenceSlots(6))
    torch.testing.assert_close(halves[:, :, 6:], apart, rtol=0, atol=1e-13)
    with torch.inference_mode():
        again = attend(query, key, value, causal=True, slots=slots, documents=documents.clone())
    assert torch.equal(again, halves)
