from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from espalier.cluster import Link
from espalier.comm import Channel
from espalier.errors import UserError
from espalier.shard import replicate as module
from espalier.shard.replicate import Piece, Replicate, buckets, cost
from espalier.testing import forks, ranks, same

ROWS = 12  # divides by 1, 2 and 4 ranks and by 3 micro-batches


class Odd(nn.Module):
    """Prime sizes, tied weights, a frozen parameter, one that no rank uses and one that only even rows use."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.embed = nn.Parameter(torch.randn(13, 11, generator=draw, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(11, generator=draw, dtype=torch.float64), requires_grad=False)
        self.inner = nn.Parameter(torch.randn(17, 11, generator=draw, dtype=torch.float64))
        self.single = nn.Parameter(torch.randn(17, generator=draw, dtype=torch.float64)[3].clone())
        self.unused = nn.Parameter(torch.randn(5, generator=draw, dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.randn(17, generator=draw, dtype=torch.float64))
        self.head = nn.Linear(11, 13, bias=False, dtype=torch.float64)
        self.head.weight = self.embed
        self.register_buffer("scale", torch.full((3,), 2.0, dtype=torch.float64))

    def forward(self, tokens: Tensor, extra: bool) -> Tensor:
        hidden = self.embed[tokens] + self.frozen
        hidden = torch.tanh(hidden @ self.inner.t()) * self.single
        if extra:
            hidden = hidden + self.sometimes
        return torch.log_softmax(self.head(hidden @ self.inner), -1)


def _loss(model: Odd, rows: range) -> Tensor:
    tokens = torch.arange(ROWS * 5).view(ROWS, 5) * 7 % 13
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:  # one forward per row, so that what a row uses does not depend on its company
        total = total - model(tokens[row], extra=row == 4).diagonal(0, -2, -1).sum()
    return total


def _gradients(model: Odd) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()
    }


def _whole() -> dict[str, Tensor | None]:
    model = Odd()
    _loss(model, range(ROWS)).backward()
    return _gradients(model)


def _replicated(channel: Channel | None, accumulate: int, bucket_bytes: int, steps: int = 1) -> Any:
    n, rank = (channel.size(), channel.rank()) if channel is not None else (1, 0)
    model = Odd()
    replicate = Replicate(model, channel, bucket_bytes=bucket_bytes)
    mine = range(rank * ROWS // n, (rank + 1) * ROWS // n)
    size = len(mine) // accumulate
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        for index in range(accumulate):
            with replicate.accumulate(last=index == accumulate - 1):
                _loss(model, mine[index * size : (index + 1) * size]).backward()
        replicate.wait()
    return _gradients(model)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 10**6])
def test_summed_gradients_equal_the_whole_batchs(n: int, accumulate: int, bucket_bytes: int) -> None:
    for found in ranks(n, _replicated, accumulate, bucket_bytes, 2):
        same(found, _whole(), relative=1e-12)
        assert found["unused"] is None
        assert found["frozen"] is None
        assert found["sometimes"] is not None


@pytest.mark.parametrize("n", [2, 4])
def test_summed_gradients_equal_the_whole_batchs_on_real_ranks(n: int) -> None:
    for found in forks(n, _replicated, 3, 700, 3):
        same(found, _whole(), relative=1e-12)


def test_without_a_channel_nothing_is_added() -> None:
    model = Odd()
    replicate = Replicate(model, None)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert replicate._buckets == []
    same(_replicated(None, 1, 10), _whole(), bitwise=True)


def _views(channel: Channel) -> Any:
    model = Odd()
    replicate = Replicate(model, channel, bucket_bytes=1000)
    addresses = []
    for step in range(2):
        model.zero_grad(set_to_none=step == 0)  # zeroed in place the second time: the same buffers are used on
        with replicate.accumulate(last=True):
            _loss(model, range(ROWS)).backward()
        replicate.wait()
        addresses.append({name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None})
    base = {bucket.buffer.untyped_storage().data_ptr() for bucket in replicate._buckets}
    inside = all(p.grad is None or p.grad.untyped_storage().data_ptr() in base for p in model.parameters())
    replicate.detach()
    left = any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    return addresses, inside, left, _gradients(model)


def test_gradients_are_views_of_the_same_buffers_step_after_step() -> None:
    for (first, second), inside, left, found in ranks(2, _views):
        assert first == second
        assert inside
        assert not left
        same(found, {k: None if g is None else 2 * g for k, g in _whole().items()}, relative=1e-12)


def _overlap(channel: Channel) -> list[str]:
    """The order of launches and of gradients arriving."""
    model = nn.Sequential(*[nn.Linear(9, 9, bias=False) for _ in range(4)])
    order: list[str] = []
    launch = module._Bucket.launch

    def noted(bucket: Any, group: Any) -> None:
        order.append(f"launch {bucket.slots[0].name}")
        launch(bucket, group)

    replicate = Replicate(model, channel, bucket_bytes=1)
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: order.append(f"gradient {name}"))
    for bucket in replicate._buckets:
        bucket.launch = noted.__get__(bucket)  # type: ignore[method-assign]
    for last in (False, True):
        with replicate.accumulate(last):
            model(torch.ones(2, 9)).sum().backward()
        order.append("backward ended")
    replicate.wait()
    return order


def test_exchange_overlaps_backward_in_the_last_micro_batch_only() -> None:
    names = [f"{index}.weight" for index in (3, 2, 1, 0)]
    plain = [f"gradient {name}" for name in names]
    overlapped = [text for name in names for text in (f"gradient {name}", f"launch {name}")]
    for order in ranks(2, _overlap):
        assert order == [*plain, "backward ended", *overlapped, "backward ended"]


# --- the start ---


def _unequal_values(channel: Channel) -> Any:
    torch.manual_seed(channel.rank())
    model = Odd()
    with torch.no_grad():
        model.inner.add_(channel.rank())
        model.scale.add_(channel.rank())
        model.inner.data = model.inner.data.t().contiguous().t()  # not contiguous
    Replicate(model, channel)
    return model.state_dict(), channel.ledger.by_class().get("parameters", 0)


def test_every_rank_starts_from_rank_zeros_values() -> None:
    expected = Odd().state_dict()
    for rank, (state, sent) in enumerate(forks(3, _unequal_values)):
        same(state, expected, bitwise=True)
        assert (sent > 0) == (rank == 0)


def _equal_values(channel: Channel) -> dict[str, float]:
    Replicate(Odd(), channel)
    return channel.ledger.by_class()


def test_equal_models_send_two_hashes_and_no_parameter() -> None:
    assert ranks(2, _equal_values) == [{"control": 16.0}] * 2


def _unequal_shapes(channel: Channel) -> None:
    Replicate(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5 + (channel.rank() == 2))), channel)


def test_the_first_difference_between_ranks_is_named() -> None:
    with pytest.raises(UserError, match=r"rank 0 has '1.weight: \[5, 4\].*rank 2 has '1.weight: \[6, 4\]"):
        ranks(3, _unequal_shapes)


# --- mistakes ---


def _changed(channel: Channel, change: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    replicate = Replicate(model, channel)
    if change == "replaced":
        model[1].weight = nn.Parameter(torch.ones(3, 3))
    elif change == "frozen":
        model[1].bias.requires_grad_(False)
    else:
        model.append(nn.Linear(3, 3))
    with replicate.accumulate(last=True):
        model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize(("change", "where"), [("replaced", "1.weight"), ("frozen", "1.bias"), ("grown", "Sequential")])
def test_a_model_changed_after_wrapping_is_refused(change: str, where: str) -> None:
    with pytest.raises(UserError, match=f"changed at '{where}' after it was wrapped"):
        ranks(2, _changed, change)


def _no_last(channel: Channel) -> None:
    model = nn.Linear(3, 3)
    replicate = Replicate(model, channel)
    with replicate.accumulate(last=False):
        model(torch.ones(1, 3)).sum().backward()
    replicate.wait()


def test_waiting_without_a_last_micro_batch_is_refused() -> None:
    with pytest.raises(UserError, match="last=True"):
        ranks(2, _no_last)


def _two_backwards(channel: Channel) -> None:
    model = nn.Linear(3, 3)
    with Replicate(model, channel).accumulate(last=True):
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()


def test_two_backwards_in_one_micro_batch_are_refused() -> None:
    with pytest.raises(UserError, match="twice in one backward"):
        ranks(2, _two_backwards)


def _checkpointed(channel: Channel) -> Tensor:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    nn.init.constant_(layer.weight, 0.1)
    nn.init.constant_(layer.bias, 0.1)
    replicate = Replicate(layer, channel)
    with replicate.accumulate(last=True):
        checkpoint(layer, torch.ones(2, 3, dtype=torch.float64), use_reentrant=False).sum().backward()
    replicate.wait()
    assert layer.weight.grad is not None
    return layer.weight.grad


def test_activation_checkpointing_counts_once() -> None:
    for grad in ranks(2, _checkpointed):
        same(grad, torch.full((3, 3), 4.0, dtype=torch.float64))


def _after_an_error(channel: Channel) -> Tensor:
    model = nn.Linear(3, 3, bias=False)
    nn.init.constant_(model.weight, 0.1)
    replicate = Replicate(model, channel)
    with pytest.raises(ZeroDivisionError), replicate.accumulate(last=True):
        raise ZeroDivisionError
    with replicate.accumulate(last=True):
        model(torch.ones(1, 3)).sum().backward()
    replicate.wait()
    assert model.weight.grad is not None
    return model.weight.grad


def test_a_step_that_failed_before_its_exchange_can_be_run_again() -> None:
    for grad in ranks(2, _after_an_error):
        same(grad, torch.full((3, 3), 2.0))


def _memory_format(channel: Channel) -> Any:
    model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    replicate = Replicate(model, channel)
    with replicate.accumulate(last=True):
        model(torch.ones(1, 3, 4, 4)).sum().backward()
    replicate.wait()
    assert model.weight.grad is not None
    return model.weight.grad.stride() == model.weight.stride(), model.weight.grad.clone()


def test_gradients_keep_their_parameters_strides() -> None:
    for kept, grad in ranks(2, _memory_format):
        assert kept
        same(grad, torch.full_like(grad, 8.0))


# --- buckets and cost ---

pieces_ = st.lists(
    st.builds(Piece, st.integers(0, 5000), st.sampled_from([2, 4, 8]), st.sampled_from(["cpu", "cuda"])), max_size=30
)


@given(pieces_, st.integers(1, 20_000))
def test_every_parameter_is_in_one_bucket_of_its_kind(pieces: list[Piece], bucket_bytes: int) -> None:
    found = buckets(pieces, bucket_bytes)
    assert sorted(index for bucket in found for index in bucket) == list(range(len(pieces)))
    for bucket in found:
        assert len({(pieces[index].element_bytes, pieces[index].group) for index in bucket}) == 1
        assert bucket == sorted(bucket, reverse=True)
        before_last = sum(pieces[index].elements * pieces[index].element_bytes for index in bucket[:-1])
        assert before_last < bucket_bytes


def test_the_first_bucket_is_small() -> None:
    pieces = [Piece(2**18, 4)] * 30  # a MiB each
    sizes = [len(bucket) for bucket in buckets(pieces)]
    assert sizes == [1, 25, 4]


class Mixed(nn.Module):
    """Parameters of three dtypes, of sizes that are multiples of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.singles = nn.Parameter(torch.ones(101, 7))
        self.doubles = nn.Parameter(torch.ones(53, dtype=torch.float64))
        self.halves = nn.Parameter(torch.ones(997, dtype=torch.bfloat16))
        self.more = nn.Parameter(torch.ones(3, 1009))
        self.idle = nn.Parameter(torch.ones(11))

    def forward(self) -> Tensor:
        used = (self.singles, self.doubles, self.halves, self.more)
        return torch.stack([parameter.double().sum() for parameter in used]).sum()


def _ledger(channel: Channel, bucket_bytes: int) -> Any:
    model = Mixed()
    replicate = Replicate(model, channel, bucket_bytes=bucket_bytes)
    before = channel.ledger.by_class().get("gradients", 0)
    for last in (False, True):
        with replicate.accumulate(last):
            model().backward()
    replicate.wait()
    return channel.ledger.by_class()["gradients"] - before, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 5000, 10**7])
def test_predicted_bytes_are_the_ledgers(n: int, bucket_bytes: int) -> None:
    pieces = [Piece(p.numel(), p.element_size(), (p.dtype, p.device)) for p in Mixed().parameters()]
    link = Link(bandwidth=1e9, latency=1e-5)
    predicted = cost(pieces, n, link, bucket_bytes=bucket_bytes).sent["gradients"]
    for sent, grads in ranks(n, _ledger, bucket_bytes):
        assert sent == predicted
        same(grads[:4], [torch.full_like(p, 2 * n) for p in list(Mixed().parameters())[:4]])
        assert grads[4] is None


def test_cost_follows_its_formula_and_takes_arrays() -> None:
    pieces = [Piece(1000, 4), Piece(999, 4)]
    link = Link(bandwidth=1e6, latency=1e-3, launch=1e-2)
    many = cost(pieces, np.array([1, 2, 4]), link, bucket_bytes=1)
    volume = 4 * (1999 + 2)
    np.testing.assert_allclose(many.sent["gradients"], [0, volume, 1.5 * volume])
    expected = [0, 2 * (1e-2 + 2e-3) + volume / 1e6, 2 * (1e-2 + 6e-3) + 1.5 * volume / 1e6]
    np.testing.assert_allclose(many.seconds["all_reduce"], expected)
    np.testing.assert_allclose(many.held["buckets"], [0, volume, volume])
    for index, n in enumerate((1, 2, 4)):
        assert cost(pieces, n, link, bucket_bytes=1).sent["gradients"] == many.sent["gradients"][index]
