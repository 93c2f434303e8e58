"""The laws of the sharding engine: whatever the factors, the result is the whole batch's on one rank."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from nets import ROWS, TWO_NODES, Odd, every, loss, one_step, plain, rounds, spread, triples, whole
from torch import Tensor, nn

from espalier.comm import Channel
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.optim import adamw, muon
from espalier.optim.base import owned_by
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.axes.placement_plan import Spread
from espalier.recipe import Adamw, Muon
from espalier.recipe.errors import UserError
from many_ranks import forks, ranks, same

STEPS = 20


def _trained(channel: Channel, how: Spread, accumulate: int, dtype: torch.dtype, steps: int = STEPS) -> Any:
    sharding, _, norms = spread(channel, how, steps, accumulate, dtype)
    return whole(sharding), norms


# --- the same as plain PyTorch ---


def _often(factors: ShardFactors) -> Any:
    """Strategies with names, and one with three different factors, in every suite; the others in the slow one."""
    plain = set(factors) <= {1, 8} or tuple(factors) == (2, 4, 8)
    return pytest.param(factors, marks=() if plain else pytest.mark.slow, id="-".join(map(str, factors)))


@pytest.mark.extremes
@pytest.mark.parametrize("factors", [_often(factors) for factors in triples(8)])
def test_every_triple_on_eight_ranks_trains_as_one_rank_does(factors: ShardFactors) -> None:
    steps = STEPS // 4  # all twenty on real ranks: below, and marked slow for eight
    expected = plain(torch.float64, steps)
    how = every(factors, nodes=TWO_NODES[8] if sum(factors) % 2 else (), bucket_bytes=20_000)
    for parameters, norms in ranks(8, _trained, how, 3, torch.float64, steps):
        same(parameters, expected["parameters"], relative=1e-12)
        same(norms, expected["norms"], relative=1e-12)


def _all_triples(channel: Channel, accumulate: int, dtype: torch.dtype, nodes: Any, step: int) -> Any:
    how = [every(factors, nodes=nodes, bucket_bytes=5000) for factors in triples(4)[::step]]
    return [_trained(channel, one, accumulate, dtype) for one in how]


@pytest.mark.parametrize(
    ("accumulate", "dtype", "tolerance", "nodes", "step"),
    [
        (3, torch.float64, 1e-12, TWO_NODES[4], 6),
        pytest.param(3, torch.float64, 1e-12, TWO_NODES[4], 1, marks=pytest.mark.slow),
        pytest.param(1, torch.float32, 1e-5, (), 1, marks=pytest.mark.slow),
        pytest.param(1, torch.float64, 1e-12, (), 1, marks=pytest.mark.slow),
    ],
)
def test_every_triple_on_four_gloo_ranks_trains_as_one_rank_does(
    accumulate: int, dtype: torch.dtype, tolerance: float, nodes: Any, step: int
) -> None:
    """Every sixth in the normal suite; on threads all are in it (the test above)."""
    expected = plain(dtype, STEPS)
    for results in forks(4, _all_triples, accumulate, dtype, nodes, step, timeout=150):
        for parameters, norms in results:
            same(parameters, expected["parameters"], relative=tolerance)
            same(norms, expected["norms"], relative=tolerance)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [(), TWO_NODES[8]])
@pytest.mark.parametrize("factors", triples(8), ids=lambda factors: "-".join(map(str, factors)))
def test_every_triple_on_eight_gloo_ranks_trains_as_one_rank_does(factors: ShardFactors, nodes: Any) -> None:
    expected = plain(torch.float64, STEPS)
    for parameters, norms in forks(8, _trained, every(factors, nodes=nodes), 3, torch.float64, timeout=300.0):
        same(parameters, expected["parameters"], relative=1e-12)
        same(norms, expected["norms"], relative=1e-12)


MIXED = [("blocks.1.*", ShardFactors(2, 4, 4)), ("blocks.*", ShardFactors(1, 2, 4)), ("embed", ShardFactors(4, 4, 4))]


def test_every_part_of_a_model_may_have_factors_of_its_own() -> None:
    expected = plain(torch.float64, STEPS)
    for parameters, norms in ranks(4, _trained, Spread(factors=MIXED, bucket_bytes=1000), 3, torch.float64):
        same(parameters, expected["parameters"], relative=1e-12)
        same(norms, expected["norms"], relative=1e-12)


def _gradients(channel: Channel, factors: ShardFactors) -> dict[str, Any]:
    sharding = Amsp(Odd(), channel, every(factors))
    for last, rows in rounds(channel.rank(), channel.size(), 2):
        with sharding.accumulate(last):
            loss(sharding.model, rows).backward()
    sharding.wait()
    return {one.name: one.tensor.grad for one in sharding.owned}


@pytest.mark.parametrize("factors", [ShardFactors(), ShardFactors(1, 2, 4), ShardFactors(4, 4, 4)])
def test_what_no_rank_used_gets_no_gradient_and_what_some_used_gets_it_everywhere(factors: ShardFactors) -> None:
    seen: dict[str, list[Any]] = {}
    for found in ranks(4, _gradients, factors):
        assert "frozen" not in found
        for name, gradient in found.items():
            seen.setdefault(name, []).append(gradient)
    assert all(gradient is None for gradient in seen.pop("unused"))
    assert {name for name, _ in Odd().named_parameters()} - {"frozen", "unused"} == set(seen)
    assert all(gradient is not None for gradients in seen.values() for gradient in gradients)


def _unequal(channel: Channel, factors: ShardFactors) -> dict[str, Tensor]:
    cuts = [0, 1, 8, 13, ROWS]
    sharding = Amsp(Odd(), channel, every(factors))
    optimizer = adamw.build(Adamw(learning_rate=1e-2), sharding.owned)
    rows = range(cuts[channel.rank()], cuts[channel.rank() + 1])
    for step in range(STEPS):
        sharding.clear()
        with sharding.accumulate(last=True):
            loss(sharding.model, rows, step).backward()
        sharding.wait()
        optimizer.step(1.0)
        sharding.refresh()
    return whole(sharding)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("factors", [ShardFactors(), ShardFactors(1, 1, 4), ShardFactors(2, 2, 4)])
def test_unequal_shares_equal_the_whole_batch(factors: ShardFactors) -> None:
    expected = plain(torch.float64, STEPS)["parameters"]
    for parameters in ranks(4, _unequal, factors):
        same(parameters, expected, relative=1e-12)


# --- Muon: whole matrices, each with one owner ---

MUON = Muon(learning_rate=1e-2, adamw=Adamw(learning_rate=1e-2))


def _muon(channel: Channel | None, factors: ShardFactors) -> Any:
    model = Odd()
    tables = frozenset({"embed"})
    hidden = frozenset(one.name for one in owned_by(model) if muon.moves(one, tables))
    sharding = Amsp(model, channel, every(factors, whole=hidden, bucket_bytes=2000))
    optimizer = muon.build(MUON, sharding.owned, tables)
    mine = sorted(one.name for one in sharding.owned if one.name in hidden)
    place = (0, 1) if channel is None else (channel.rank(), channel.size())
    for step in range(5):
        one_step(sharding, optimizer, step, 1, place)
    return whole(sharding), mine


@pytest.mark.parametrize(
    "factors", [ShardFactors(), ShardFactors(1, 1, 4), ShardFactors(1, 2, 2), ShardFactors(2, 4, 4)]
)
def test_muon_moves_each_matrix_on_one_rank_as_it_would_move_it_alone(factors: ShardFactors) -> None:
    expected, every_matrix = _muon(None, ShardFactors())
    owners: list[str] = []
    for parameters, mine in ranks(4, _muon, factors):
        same(parameters, expected, relative=1e-10)
        owners += mine
    assert sorted(owners) == sorted(every_matrix * (4 // factors.optimizer))


# --- the start ---


def _unequal_values(channel: Channel, factors: ShardFactors) -> dict[str, Tensor]:
    model = Odd()
    with torch.no_grad():
        model.embed.add_(channel.rank())
        model.scale.add_(channel.rank())
        first = model.blocks[0].inner.weight
        first.data = first.data.t().contiguous().t()  # not contiguous
    sharding = Amsp(model, channel, every(factors))
    sharding.detach()
    return sharding.model.state_dict()


@pytest.mark.parametrize("factors", [ShardFactors(), ShardFactors(3, 3, 3)])
def test_every_rank_starts_from_rank_zeros_values(factors: ShardFactors) -> None:
    for state in ranks(3, _unequal_values, factors):
        same(state, Odd().state_dict(), bitwise=True)


def _unequal_shapes(channel: Channel) -> None:
    Amsp(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5 + (channel.rank() == 2))), channel)


def test_the_first_difference_between_ranks_is_named() -> None:
    with pytest.raises(UserError, match=r"rank 0 has '1.weight: \[5, 4\].*rank 2 has '1.weight: \[6, 4\]"):
        ranks(3, _unequal_shapes)


def test_without_a_channel_nothing_is_added() -> None:
    model = Odd()
    sharding = Amsp(model, None)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert [one.tensor for one in sharding.owned] == [p for p in model.parameters() if p.requires_grad]


def _after_an_error(channel: Channel, factors: ShardFactors) -> Any:
    model = nn.Linear(3, 3, bias=False)
    nn.init.constant_(model.weight, 0.1)
    sharding = Amsp(model, channel, every(factors))
    sharding.clear()
    with pytest.raises(ZeroDivisionError), sharding.accumulate(last=True):
        raise ZeroDivisionError
    sharding.clear()
    with sharding.accumulate(last=True):
        model(torch.ones(1, 3)).sum().backward()
    sharding.wait()
    return [one.tensor.grad.flatten() for one in sharding.owned]


@pytest.mark.parametrize("factors", [ShardFactors(), ShardFactors(2, 2, 2)])
def test_a_step_that_failed_before_its_exchange_can_be_run_again(factors: ShardFactors) -> None:
    for grads in ranks(2, _after_an_error, factors):
        same(torch.cat(grads), torch.full((9 if factors.optimizer == 1 else len(torch.cat(grads)),), 2.0))


class _Ended(Exception):
    """Others are gone."""


def _wrapped_again(channel: Channel) -> Any:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    for layer in model:
        nn.init.constant_(layer.weight, 0.1)
    first = Amsp(model, channel, every(ShardFactors()))

    def ended(_: Tensor) -> None:
        raise _Ended

    broken = model[1].weight.register_post_accumulate_grad_hook(ended)  # the first one to get its gradient
    with pytest.raises(_Ended), first.accumulate(last=True):
        model(torch.ones(1, 3)).sum().backward()
    broken.remove()
    second = Amsp(model, channel, every(ShardFactors()))
    for _ in range(2):
        second.clear()
        with second.accumulate(last=True):
            model(torch.ones(1, 3)).sum().backward()
        second.wait()
    return [one.tensor.grad.flatten() for one in second.owned]


def test_a_model_whose_backward_was_broken_off_can_be_wrapped_again() -> None:
    for grads in ranks(2, _wrapped_again):
        same(grads[-1], torch.full((9,), 0.6))


def _buffers_after_wrapping_again(channel: Channel, factors: ShardFactors) -> tuple[int, int]:
    """How many buffers of the first wrapping were alive before and after the second, with gradients there."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    first = Amsp(model, channel, every(factors))
    first.clear()
    with first.accumulate(last=True):
        model(torch.ones(1, 8)).sum().backward()
    first.wait()
    first.refresh()
    first.settle()
    state = {name: one.clone() for name, one in _values(first).items()}
    held = [ref(flat) for flat in first.flats]
    held += [ref(one.untyped_storage()) for flat in first.flats for one in (flat.full, flat.part, flat.summed)]
    del first
    gc.collect()
    before = sum(one() is not None for one in held)
    for name, parameter in model.named_parameters():  # as after a restart, from a copy
        parameter.data = state[name]
    second = Amsp(model, channel, every(factors))
    gc.collect()
    assert second.flats
    return before, sum(one() is not None for one in held)


def _values(sharding: Amsp) -> dict[str, Tensor]:
    return {
        slot.name: values[slot.span.start : slot.span.stop].view(slot.shape)
        for flat in sharding.flats
        for values in [sharding.whole(flat, flat.local)]
        for slot in flat.slots
    }


@pytest.mark.parametrize("factors", triples(2), ids=str)
def test_buffers_of_a_wrapping_die_when_the_model_is_wrapped_again(factors: ShardFactors) -> None:
    for before, after in forks(2, _buffers_after_wrapping_again, factors):
        assert before > 0
        assert after == 0


def _overlap(channel: Channel) -> list[str]:
    """The order of launches and of gradients arriving."""
    model = nn.Sequential(*[nn.Linear(9, 9, bias=False) for _ in range(4)])
    order: list[str] = []
    sharding = Amsp(model, channel, every(ShardFactors(), bucket_bytes=1))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: order.append(f"gradient {name}"))
    for flat in sharding.flats:
        exchange = flat.exchange

        def noted(last: bool, flat: Any = flat, exchange: Any = exchange) -> Any:
            order.append(f"launch {flat.slots[0].name}")
            return exchange(last)

        flat.exchange = noted  # type: ignore[method-assign]
    for last in (False, True):
        with sharding.accumulate(last):
            model(torch.ones(2, 9)).sum().backward()
        order.append("backward ended")
    sharding.wait()
    return order


def test_exchange_overlaps_backward_in_the_last_micro_batch_only() -> None:
    names = [f"{index}.weight" for index in (3, 2, 1, 0)]
    plainly = [f"gradient {name}" for name in names]
    overlapped = [text for name in names for text in (f"gradient {name}", f"launch {name}")]
    for order in ranks(2, _overlap):
        assert order == [*plainly, "backward ended", *overlapped, "backward ended"]
