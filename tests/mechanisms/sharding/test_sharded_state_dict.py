"""A checkpoint of any sharding resumes under any other, on any number of ranks, and in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import TWO_NODES, Odd, every, one_step, plain, spread, triples, whole

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.tensor_slice import boxes
from espalier.comm import Channel, plain_collectives
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.optim import adamw
from espalier.plan.axes.placement import ShardFactors
from espalier.recipe import Adamw
from many_ranks import forks, same

BEFORE, STEPS = 2, 4


def _saved(channel: Channel | None, folder: Path, factors: ShardFactors) -> None:
    sharding, optimizer, _ = spread(channel, every(factors, bucket_bytes=3000), BEFORE)
    Checkpoints(folder, group=_team(channel)).save(BEFORE, sharding.parts(optimizer), {}, wait=True)


def _team(channel: Channel | None) -> Any:
    return None if channel is None else torch.distributed.new_group(backend="gloo")


def _resumed(channel: Channel | None, folder: Path, factors: ShardFactors) -> Any:
    """(parameters as loaded, parameters after the steps that are left)."""
    place = (0, 1) if channel is None else (channel.rank(), channel.size())
    sharding = Amsp(Odd(), channel, every(factors, nodes=TWO_NODES.get(place[1], ()), bucket_bytes=5000))
    optimizer = adamw.build(Adamw(learning_rate=1e-2), sharding.owned)
    assert Checkpoints(folder, group=_team(channel)).load(sharding.parts(optimizer)) is not None
    loaded = {name: p.detach().clone() for name, p in sharding.model.named_parameters()}
    for step in range(BEFORE, STEPS):
        one_step(sharding, optimizer, step, 1, place)
    return loaded, whole(sharding)


def _all_saved(channel: Channel, folder: Path) -> None:
    for number, factors in enumerate(triples(4)):
        _saved(channel, folder / str(number), factors)


def _some_resumed(channel: Channel, folder: Path) -> Any:
    """Each under two others (on two ranks, under one)."""
    targets = triples(channel.size())
    saved = sorted(folder.iterdir(), key=lambda one: int(one.name))
    pairs = [(one, 3 * number + more) for number, one in enumerate(saved) for more in range(1, channel.size() // 2 + 1)]
    return [_resumed(channel, one, targets[number % len(targets)])[1] for one, number in pairs]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    forks(4, _all_saved, folder, timeout=150)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("n", [pytest.param(4, marks=pytest.mark.slow), 2])
def test_every_triples_checkpoint_resumes_under_others_and_on_other_numbers_of_ranks(saved: Path, n: int) -> None:
    end = plain(torch.float64, STEPS)["parameters"]
    for results in forks(n, _some_resumed, saved, timeout=150):
        assert len(results) == 10 * n // 2
        for trained in results:
            same(trained, end, relative=1e-12)


def _exhaustive(channel: Channel, folder: Path) -> Any:
    return [_resumed(channel, one, factors) for one in sorted(folder.iterdir()) for factors in triples(4)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_triples_checkpoint_resumes_under_every_other(saved: Path) -> None:
    end = plain(torch.float64, STEPS)["parameters"]
    for results in forks(4, _exhaustive, saved, timeout=800.0):
        assert len(results) == 100
        for _, trained in results:
            same(trained, end, relative=1e-12)


def test_one_rank_takes_up_what_four_have_saved_and_they_what_it_has(saved: Path, tmp_path: Path) -> None:
    middle, end = (plain(torch.float64, steps)["parameters"] for steps in (BEFORE, STEPS))
    loaded, trained = _resumed(None, saved / "9", ShardFactors())
    same(loaded, middle, relative=1e-12)
    same(trained, end, relative=1e-12)
    _saved(None, tmp_path, ShardFactors())
    for loaded, trained in forks(4, _resumed, tmp_path, ShardFactors(1, 2, 4)):
        same(loaded, middle, bitwise=True)
        same(trained, end, relative=1e-12)


def _loaded_bits(channel: Channel, folder: Path, factors: ShardFactors) -> Any:
    sharding, optimizer, _ = spread(channel, every(factors), BEFORE)
    before = {name: value.clone() for name, value in optimizer.state_dict().items()}
    Checkpoints(folder, group=_team(channel)).save(BEFORE, sharding.parts(optimizer), {}, wait=True)
    fresh, other, _ = spread(channel, every(factors), 1)
    Checkpoints(folder, group=_team(channel)).load(fresh.parts(other))
    return before, other.state_dict(), whole(sharding), whole(fresh)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("factors", [ShardFactors(), ShardFactors(1, 2, 4), ShardFactors(4, 4, 4)])
def test_what_is_loaded_under_the_same_factors_is_what_was_saved_bit_for_bit(
    factors: ShardFactors, tmp_path: Path
) -> None:
    for before, after, parameters, loaded in forks(4, _loaded_bits, tmp_path, factors):
        same(after, before, bitwise=True)
        same(loaded, parameters, bitwise=True)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_run_of_elements_is_a_few_boxes(shape: list[int], data: st.DataObject) -> None:
    whole_ = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole_.numel()))
    stop = data.draw(st.integers(start, whole_.numel()))
    found = list(boxes(shape, start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    values = []
    for box in found:
        assert box.first == len(values)
        part = whole_[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
        values += part.reshape(-1).tolist()
    assert values == list(range(start, stop))


def _asked(channel: Channel) -> list[int]:
    """How often the ranks asked each other for the kinds of states, at a save after each step."""
    asked = []
    sharding = Amsp(Odd(), channel, every(ShardFactors(1, 1, channel.size()), bucket_bytes=3000))
    optimizer = adamw.build(Adamw(learning_rate=1e-2), sharding.owned)
    plain, count = plain_collectives.all_gather, 0

    def counting(*given: Any) -> list[Any]:
        nonlocal count
        count += 1
        return plain(*given)

    plain_collectives.all_gather = counting  # type: ignore[assignment]
    for step in range(3):
        one_step(sharding, optimizer, step, 1, (channel.rank(), channel.size()))
        before = count
        sharding.parts(optimizer)["optimizer"].state_dict()
        asked.append(count - before)
    return asked


def test_what_states_there_are_is_asked_once() -> None:
    assert forks(2, _asked) == [[1, 0, 0]] * 2
