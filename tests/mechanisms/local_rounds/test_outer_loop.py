"""The outer engine does what the papers' recurrences say, bit for bit, whatever the timing, wherever it was saved."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from crews import RATE, SIZES, Replica, simulated, together
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from espalier.mechanisms.local_rounds.fragment import split
from espalier.mechanisms.local_rounds.outer_loop import OuterSync
from espalier.mechanisms.local_rounds.round_length import Rounds
from espalier.optim.diloco_slowmo import METHODS, OuterMethod
from espalier.optim.outer_optimizer import OuterUpdate
from espalier.recipe.errors import UserError

Make = Callable[..., OuterSync]
FORMS = {
    "co2": OuterMethod(momentum=0.5, scaled=True),
    "co2, gap": replace(METHODS["co2"], warm=4),
    "co2, gap, plain form, clip": OuterMethod(momentum=0.6, penalty="gap", rate=0.5, clip=0.2),
    "co2, parameters": OuterMethod(average="parameters", momentum=0.2, scaled=True),
    "co2, plain form, clip": OuterMethod(momentum=0.6, clip=0.05),
    "eager": METHODS["eager"],
    "eager, momentum": OuterMethod(eager=True, momentum=0.5, scaled=True),
    "slowmo": METHODS["slowmo"],
    "diloco": METHODS["diloco"],
    "local sgd": METHODS["local_sgd"],
}


def outer_of(engine: OuterSync) -> Tensor:
    return torch.cat([fragment.x for fragment in engine.fragments]).clone()


def train(replica: Replica, engine: OuterSync, rounds: int, sleepy: bool = False) -> list[Tensor]:
    found = []
    while len(found) < rounds:
        replica.step()
        if sleepy:
            time.sleep(random.random() * 0.003)
        if engine.after_step(RATE):
            found.append(outer_of(engine))
    return found


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if number % 2 else ()) for number, one in enumerate(FORMS)]
)
def test_twenty_rounds_are_those_of_the_recurrence_to_the_bit(count: int, name: str) -> None:
    choices = FORMS[name]

    def run(member: int, make: Make) -> list[Tensor]:
        replica = Replica(member)
        return train(replica, make(replica, choices, Rounds(3)), 20, sleepy=count == 3)

    expected = simulated(count, choices, 3, 20)
    for found in together(count, run):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_one_step_without_delay_is_data_parallel() -> None:
    """The mean of one SGD step each is one SGD step with the mean gradient."""

    def run(member: int, make: Make) -> Tensor:
        replica = Replica(member)
        engine = make(replica, METHODS["local_sgd"], Rounds(1))
        for _ in range(30):
            for tensor, target in zip(replica.live, replica.target, strict=True):
                tensor.sub_(RATE * (tensor - target))
            engine.after_step(RATE)
        return replica.flat()

    one, targets = Replica(0), [torch.cat(Replica(member).target) for member in range(3)]
    x = one.flat()
    for _ in range(30):
        x -= RATE * torch.stack([x - target for target in targets]).mean(0)
    for found in together(3, run):
        torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_states_in_host_memory_take_nothing_of_a_device_and_move_what_is_there(name: str) -> None:
    with FakeTensorMode():
        live = [torch.empty(8, 3, device="cuda"), torch.empty(5, device="cuda")]
        fragments = min(2, METHODS[name].fragments)
        engine = OuterSync(live, replace(METHODS[name], offload=True, fragments=fragments), None, Rounds(2))
        for _ in range(6):
            engine.after_step(RATE)
        with engine.shown():
            pass
        engine.finish(RATE)
        tensors = [each for part in engine.fragments for each in (part.x, part.own_change, part.update.momentum)]
        assert {tensor.device.type for tensor in tensors if tensor is not None} == {"cpu"}
        assert {tensor.device.type for part in engine.fragments for tensor in part.live} == {"cuda"}


@pytest.mark.parametrize("name", ["eager", "streaming_diloco"])
def test_states_in_host_memory_change_no_bit(name: str) -> None:
    def run(member: int, make: Make, offload: bool) -> list[Tensor]:
        replica = Replica(member)
        return train(replica, make(replica, replace(METHODS[name], offload=offload), Rounds(4)), 5)

    first, second = (together(2, partial(run, offload=offload)) for offload in (False, True))
    assert all(map(torch.equal, itertools.chain(*first), itertools.chain(*second)))


def test_what_travels_is_a_copy() -> None:
    """Live parameters full of NaN do not reach the average."""
    for average in ("parameters", "differences"):

        def run(member: int, make: Make, average: Any = average) -> Tensor:
            replica = Replica(member, torch.float32)
            engine = make(replica, OuterMethod(average=average), Rounds(2))
            train(replica, engine, 1)
            kept = [tensor.clone() for tensor in replica.live]
            for tensor in replica.live:
                tensor.fill_(torch.nan)
            fragment = engine.fragments[0]
            engine._arrive(fragment)
            for tensor, value in zip(replica.live, kept, strict=True):
                tensor.copy_(value)
            train(replica, engine, 1)
            return outer_of(engine)

        assert all(torch.isfinite(x).all() for x in together(2, run))


def test_the_clip_binds() -> None:
    choices, clip = OuterMethod(momentum=0.5, clip=0.01, scaled=True, rate=0.7), 0.01

    def run(member: int, make: Make) -> list[Tensor]:
        replica = Replica(member)
        return train(replica, make(replica, choices, Rounds(4)), 6)

    x = together(2, run)[0]
    moved = [(after - before).abs().max() for before, after in itertools.pairwise(x)]
    assert max(moved) <= 0.7 * RATE * clip * (1 + 1e-12)
    assert max(moved) > 0.69 * RATE * clip


def test_a_state_of_another_penalty_is_refused() -> None:
    before, after = (OuterUpdate(torch.zeros(3), OuterMethod(penalty=penalty)) for penalty in ("none", "gap"))
    with pytest.raises(UserError, match=r"were not made with sync\.penalty = 'gap'"):
        after.load_state_dict(before.state_dict())


@pytest.mark.parametrize("penalty", ["norm", "per_tensor", "constant"])
def test_a_penalty_is_at_least_one_and_exactly_one_for_a_model_that_rests(penalty: Any) -> None:
    x = torch.randn(sum(SIZES), dtype=torch.float64)
    choices = OuterMethod(momentum=0.3, penalty=penalty, constant=2.0 if penalty == "constant" else 1.0)
    cuts = [0, *itertools.accumulate(SIZES)]
    update = OuterUpdate(x, choices, cuts)
    first = update.apply(torch.randn_like(x), RATE)
    assert (first == (2 if penalty == "constant" else 1)).all(), "it had not moved before the first"
    for _ in range(5):
        before, moved, scale = x.clone(), update.moved.clone(), update.scale.clone()
        difference = torch.randn_like(x)
        size = float(difference.norm())
        gap = update.apply(difference, RATE)
        assert (gap >= 1).all()
        assert len(gap) == (len(SIZES) if penalty == "per_tensor" else 1)
        if penalty == "norm":
            torch.testing.assert_close(float(gap), 1 + float(moved) / max(size, float(scale)))
            assert float(gap) > 1
            torch.testing.assert_close(float(update.moved), float((x - before).norm()))
    resting = OuterUpdate(x, replace(choices, momentum=0.0, constant=1.0), cuts)
    for _ in range(3):
        assert (resting.apply(torch.zeros_like(x), RATE) == 1).all()


def rests(choices: OuterMethod, share: float) -> float:
    """How far x is from where rounds lead in the last of 40, each of which goes `share` of the way from 1 to 0."""
    x, travelling, far = torch.ones(1, dtype=torch.float64), None, []
    update = OuterUpdate(x, choices)
    for _ in range(40):
        departed = share * x
        if travelling is not None:
            update.apply(travelling, RATE)
        travelling = departed
        far.append(abs(float(x)))
    return max(far[-6:])


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.1, 1.2, 1.3])
def test_late_rounds_of_any_length_come_to_rest(share: float) -> None:
    assert rests(METHODS["co2"], share) < 2e-3
    if share >= 1:
        former = replace(METHODS["co2"], penalty="none", momentum=0.2)
        assert rests(former, share) > 10


def test_a_penalty_of_the_gap_leaves_a_steady_move_as_it_is() -> None:
    x = torch.zeros(3, dtype=torch.float64)
    update = OuterUpdate(x, METHODS["co2"])
    for _ in range(60):
        update.apply(torch.full_like(x, 0.25), RATE)
    before = x.clone()
    update.apply(torch.full_like(x, 0.25), RATE)
    torch.testing.assert_close(before - x, torch.full_like(x, 0.25), rtol=1e-4, atol=0)


def test_a_constant_gradient_gives_the_analytic_path() -> None:
    """Each round's progress is -3 RATE, and with delay 1 x_t = x_0 - 3 RATE (t - 1)."""

    def run(member: int, make: Make) -> list[Tensor]:
        replica = Replica(0)
        engine, found = make(replica, OuterMethod(), Rounds(3)), [replica.flat()]
        for _ in range(30):
            for tensor in replica.live:
                tensor.sub_(RATE)
            if engine.after_step(RATE):
                found.append(outer_of(engine))
        return found

    for found in together(2, run):
        for t, x in enumerate(found[1:], 1):
            torch.testing.assert_close(x, found[0] - 3 * RATE * (t - 1), rtol=0, atol=1e-12)


OFTEN = ("co2", "streaming_diloco", "co2, parameters", "co2, gap")
SAVED = [*METHODS, "co2, parameters", "co2, gap"]


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in OFTEN else pytest.mark.slow) for one in SAVED])
def test_saved_in_flight_and_taken_up_again_to_the_bit(name: str) -> None:
    choices = METHODS.get(name) or FORMS[name]

    def run(member: int, make: Make) -> tuple[Tensor, Tensor]:
        replica = Replica(member, torch.float32)
        engine = make(replica, choices, Rounds(5))
        for _ in range(23):
            replica.step()
            engine.after_step(RATE)
        saved = copy.deepcopy(engine.state_dict())
        again = Replica(member, torch.float32)
        for ours, theirs in ((again.live, replica.live), (again.heavy, replica.heavy)):
            torch._foreach_copy_(ours, theirs)
        again.draw.set_state(replica.draw.get_state())
        for _ in range(50):
            replica.step()
            engine.after_step(RATE)
        unbroken = torch.cat([replica.flat(), outer_of(engine)])
        engine.close()
        fresh = make(again, choices, Rounds(9))
        fresh.load_state_dict(saved)
        for _ in range(50):
            again.step()
            fresh.after_step(RATE)
        return unbroken, torch.cat([again.flat(), outer_of(fresh)])

    for unbroken, resumed in together(2, run):
        assert torch.equal(unbroken, resumed)


@pytest.mark.parametrize("name", METHODS)
def test_at_the_end_all_are_one_and_nothing_is_lost(name: str) -> None:
    """With momentum and codec off, the end is the mean of what all did: on a linear loss exactly that."""
    choices = replace(METHODS[name], momentum=0.0, nesterov=False, rate=1.0, codec="exact")

    def run(member: int, make: Make) -> tuple[Tensor, Tensor]:
        replica = Replica(0)
        start = replica.flat()
        engine = make(replica, choices, Rounds(6))
        for _ in range(16):
            for tensor in replica.live:
                tensor.sub_(RATE * (member + 1))
            engine.after_step(RATE)
        engine.finish(RATE)
        return start, replica.flat()

    for start, end in together(3, run):
        if choices.mixing:  # keeps part of each replica's own way, so no exact figure
            assert (end < start - 10 * RATE).all()
        else:
            torch.testing.assert_close(end, start - 16 * RATE * 2, rtol=0, atol=1e-9)


def test_unequal_replicas_weigh_what_they_did() -> None:
    paces = (1.0, 0.5)

    def run(member: int, make: Make) -> Tensor:
        replica = Replica(0)
        engine = make(replica, METHODS["local_sgd"], Rounds(4, pace=paces[member]))
        assert engine.own_steps == (4, 2)[member]
        for _ in range(engine.own_steps):
            for tensor in replica.live:
                tensor.sub_(member + 1.0)
            over = engine.after_step(RATE)
        assert over
        return replica.flat()

    start = Replica(0).flat()
    for found in together(2, run):
        torch.testing.assert_close(found, start - (4 * 4 + 2 * 4) / 6)


def test_four_bits_with_feedback_stay_close_and_equal_on_all() -> None:
    def run(member: int, make: Make, name: str) -> Tensor:
        replica = Replica(member, torch.float32)
        replica.live = [torch.zeros(3000), torch.zeros(5000)]
        replica.target = [torch.randn(3000, generator=replica.draw), torch.randn(5000, generator=replica.draw)]
        replica.heavy, replica.momentum = [torch.zeros(3000), torch.zeros(5000)], 0.0
        return train(replica, make(replica, OuterMethod(momentum=0.2, codec=name), Rounds(4)), 25)[-1]

    exact = together(2, lambda member, make: run(member, make, "exact"))
    rough = together(2, lambda member, make: run(member, make, "int4"))
    assert torch.equal(rough[0], rough[1])
    assert 0 < (rough[0] - exact[0]).norm() < 0.05 * exact[0].norm()


def test_rounds_grow_until_flights_are_hidden_and_all_change_at_once() -> None:
    def run(member: int, make: Make) -> list[int]:
        replica = Replica(member)
        engine, steps = make(replica, OuterMethod(), Rounds(1, adapt=True)), []
        for _ in range(60):
            replica.step()
            time.sleep(0.001 * (1 + member))
            if engine.after_step(RATE):
                steps.append(engine.steps)
        return steps

    found = together(2, run)
    most = min(map(len, found))
    assert found[0][:most] == found[1][:most]
    assert max(found[0]) > 1


def test_what_cannot_be_is_refused() -> None:
    for wrong, name in (
        (lambda: OuterMethod(delay=1.5), "sync.delay"),
        (lambda: OuterMethod(momentum=1.0), "sync.momentum"),
        (lambda: OuterMethod(fragments=0), "sync.fragments"),
        (lambda: OuterMethod(rate=0.0), "sync.rate"),
        (lambda: OuterMethod(clip=-1.0), "sync.clip"),
        (lambda: OuterMethod(mixing=0.5), "sync.mixing"),
        (lambda: OuterMethod(average="parameters", codec="int4"), "sync.codec"),
        (lambda: OuterMethod(penalty="constant", constant=0.5), "sync.constant"),
        (lambda: OuterMethod(penalty="gap", delay=0.0), "sync.penalty"),
        (lambda: OuterMethod(penalty="gap", eager=True), "sync.penalty"),
        (lambda: OuterMethod(penalty="gap", nesterov=True), "sync.penalty"),
        (lambda: Rounds(0), "sync.steps"),
        (lambda: Rounds(4, pace=0.0), "pace"),
        (lambda: split([torch.zeros(3)], 2), "sync.fragments"),
    ):
        with pytest.raises(UserError, match=name):
            wrong()


def test_rounds_of_the_beginning_that_are_not_late_are_local_sgd() -> None:
    def run(member: int, make: Make, choices: OuterMethod) -> tuple[list[Tensor], Tensor]:
        replica = Replica(member)
        engine = make(replica, choices, Rounds(3))
        path = train(replica, engine, 5)
        replica.step()
        engine.finish(RATE)
        return path, replica.flat()

    plain = replace(METHODS["local_sgd"], scaled=True)
    warm = replace(METHODS["co2"], warm=6)
    for (ours, end), (theirs, other) in zip(
        *(together(2, partial(run, choices=each)) for each in (warm, plain)), strict=True
    ):
        assert all(map(torch.equal, ours, theirs))
        assert torch.equal(end, other)


def test_fragments_are_cut_evenly() -> None:
    tensors = [torch.zeros(size) for size in (10, 10, 10, 10, 10, 10, 10, 10)]
    assert [len(part) for part in split(tensors, 4)] == [2, 2, 2, 2]
    assert [len(part) for part in split(tensors, 8)] == [1] * 8
    assert len(split([torch.zeros(1), torch.zeros(100), torch.zeros(1)], 3)) == 3


@pytest.mark.parametrize("name", ["local_sgd", "eager"])
def test_replicas_that_are_called_leave_at_the_end_of_the_same_round_and_not_again(name: str) -> None:
    def run(member: int, make: Callable[..., OuterSync]) -> Any:
        replica = Replica(member)
        engine = make(replica, METHODS[name], Rounds(3))
        engine.summoned = lambda: member == 1 and engine.rounds >= 2
        while not engine.leaving:
            replica.step()
            engine.after_step(RATE)
        at = engine.rounds, engine.clock
        common, own = copy.deepcopy(engine.common_state()), copy.deepcopy(engine.own_state())
        engine.close()
        again = Replica(member)
        engine = make(again, METHODS[name], Rounds(3))
        engine.load_common(common)
        engine.load_own(own)
        for _ in range(9):
            again.step()
            engine.after_step(RATE)
        return at, engine.leaving, engine.whole

    found = together(3, run)
    assert len(set(found)) == 1
    (rounds, clock), leaving, whole = found[0]
    assert rounds in (3, 4, 5)
    assert clock == 0
    assert not leaving
    assert whole


def test_who_is_known_to_be_lost_is_not_waited_for() -> None:
    left = threading.Barrier(3)

    def run(member: int, make: Callable[..., OuterSync]) -> Any:
        replica = Replica(member)
        engine = make(replica, METHODS["local_sgd"], Rounds(2))
        assert engine.members is not None
        gone: set[int] = set()
        engine.members.crew = engine.members.crew._replace(lost=lambda: gone)
        for _ in range(4):
            replica.step()
            engine.after_step(RATE)
        left.wait(20)
        if member == 2:
            time.sleep(2.0)
            return None
        gone.add(2)
        began = time.monotonic()
        for _ in range(2):
            replica.step()
            engine.after_step(RATE)
        return time.monotonic() - began, engine.members.members, engine.whole

    found = together(3, run, grace=30.0)
    for seconds, members, whole in found[:2]:
        assert seconds < 25, "the grace is 30"
        assert members == (0, 1)
        assert not whole
