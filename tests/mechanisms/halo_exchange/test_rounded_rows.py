"""What rounded and late rows cost: differences with error feedback come nearer with every step; accuracy over seeds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.graph.test_workload import recipe_of
from tests.mechanisms.halo_exchange import test_sylvie
from tests.mechanisms.halo_exchange.test_halo import graph_of, network_of, parts_of
from tests.mechanisms.halo_exchange.test_halo_parallel import train as train_recipe
from tests.mechanisms.halo_exchange.test_sylvie import part_of, train

from espalier.graph.data import synthetic
from espalier.graph.parts import halo
from espalier.mechanisms.halo_exchange.quantized_exchange import Every, Sylvie
from espalier.mechanisms.halo_exchange.state import HaloAge, HaloExchangeState
from many_ranks import ranks


@pytest.mark.parametrize(("bits", "synchronize"), [(1, 1), (1, 3), (2, 1), (8, 1), (4, 0)])
def test_differences_bring_rows_that_stand_still_nearer_by_about_two_to_the_bits_in_every_step(bits, synchronize):
    """A difference is half an interval off at most, of as many intervals as there are codes; then differences are of
    one interval. Scales that are sent are up to 2 % larger, and where they begin 2^-8 of that off (bfloat16), which is
    as much again at 8 bits. Late rows are those of the step before."""
    graph, parts = graph_of(), parts_of("random", 2)

    def errors(channel):
        own = part_of(channel, "gcn", graph, parts)[1]
        rows = torch.from_numpy(graph.features)[own.owned]
        exact, found = own.exchange(rows), []
        transport = Sylvie(Every(bits, synchronize), delta=True)
        travelling = dataclasses.replace(own, transport=transport)
        for step in range(12):
            transport.begin(step)
            arrived = travelling.exchange(rows)
            found.append((float((arrived - exact).abs().max()), 0 if transport.choice.synchronous else 1))
        return found, float(exact.max() - exact.min()), float(exact.abs().max())

    for found, span, largest in ranks(2, errors):
        for step, (error, late) in enumerate(found):
            first = 1.02 * span / 2 ** (bits + 1) + largest / 2**8
            bound = first * (1.02 / 2**bits + 2**-8) ** max(0, step - late)
            assert error <= bound + 1e-6 * largest, (step, error, bound)


class Measured(Sylvie):
    """Takes down how far rows that arrive are from those that were sent in the step (relative, in the mean square)."""

    def __call__(self, halo_, sent, received, crossing):
        exact, error = torch.empty_like(received), self.errors if not crossing.backward else []
        arrive = super().__call__(halo_, sent, received, crossing)
        plain = halo.synchronous(halo_, sent.detach(), exact, crossing)

        def both():
            arrive(), plain()
            error.append(float((received - exact).norm() / exact.norm()))

        return both


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_one_bit_differences_are_a_quarter_as_wrong_as_one_bit_rows_in_the_50th_step_of_a_training(kind, monkeypatch):
    monkeypatch.setattr(test_sylvie, "STEPS", 50)
    graph, network, parts = graph_of(), network_of(kind, torch.float32), parts_of("random", 2)

    def errors(channel, delta):
        made = Measured(Every(1), delta=delta)
        made.errors = []
        train(channel, kind, graph, parts, lambda: made, network)
        return np.array(made.errors).reshape(50, -1)

    plain, delta = (ranks(2, errors, one, timeout=120) for one in (False, True))
    for one, other in zip(plain, delta, strict=True):
        assert one[49].min() > 0.2
        assert (other[49] <= one[49] / 4).all(), (other[49], one[49])


def test_late_differences_of_rows_that_move_are_those_of_the_step_before():
    """Eight bits of differences, one step late: nearer to the rows of the step before than to those of this one."""
    graph, parts = graph_of(), parts_of("random", 2)

    def moved(channel):
        own = part_of(channel, "gcn", graph, parts)[1]
        transport = Sylvie(Every(8, 0), delta=True)
        travelling = dataclasses.replace(own, transport=transport)
        start, before = torch.from_numpy(graph.features)[own.owned], None
        for step in range(9):
            transport.begin(step)
            rows = start * (1 + 0.1 * step)
            exact, arrived = own.exchange(rows), travelling.exchange(rows)
            if step > 2:  # the first message is of whole rows
                assert (arrived - before)[len(own.owned) :].abs().max() < 0.02
            before = exact
        return True

    assert ranks(2, moved) == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_bit_rows_differences_and_late_rows_are_within_half_a_point_of_whole_rows_over_five_seeds(
    tmp_path, monkeypatch
):
    """A planted graph of which 4 in 10 edges lead anywhere, so that nearly every node is at the boundary. Measured in
    points below whole rows while the dither stayed in rows: differences, which have none, 0.04, late 1-bit rows 0.39,
    fresh 1-bit rows 0.53 (standard errors 0.1). Since it is taken off: fresh rows 0.01, 0.41, -0.43, 0.32
    and 0.16, late ones of the second 0.66."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = "planted:nodes=6000,degree=20,classes=8,features=32,homophily=0.6,skew=1,signal=0.7"
    graph = synthetic.load(path, tmp_path)
    goal, found = 0.5, {}
    halos = {"whole": {"bits": 32}, "rows": {"bits": 1}, "late": {"bits": 1, "synchronize": 5, "late": True}}
    for name, options in {**halos, "differences": {"bits": 1, "delta": True}}.items():
        held_out = []
        for seed in range(5):
            rates = {"optimizer": {"kind": "adamw", "learning_rate": 0.01}, "seed": seed, "steps": 160}
            model = {"kind": "sage", "width": 64, "norm": True}  # a norm as the authors have it
            recipe = recipe_of(model, {"halo": options}, precision="fp32", **rates)
            figures = train_recipe(recipe, graph, (25, 50, 75))["validation"][-1]
            held_out += [100 * figures["accuracy"], 100 * figures["test_accuracy"]]  # of as many nodes
        found[name] = np.mean(held_out)
    assert 60 < found["whole"] < 99.5
    for name in ("rows", "late", "differences"):
        assert found[name] > found["whole"] - goal, (name, found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_step_of_age_costs_accuracy_early_in_training(tmp_path, monkeypatch):
    """Held-out accuracy after 40 steps, of three seeds; measured: 86.0, 82.3 and 77.7 %, and after 80 steps 91.2, 90.4
    and 88.5; rows of four steps before 74.1 and 88.6."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graph = synthetic.load(
        "planted:nodes=3000,degree=20,classes=8,features=32,homophily=0.6,skew=1,signal=0.7", tmp_path
    )
    found = dict.fromkeys((0, 1, 2), 0.0)
    for age in found:
        ages = (HaloAge(nodes=(0, 0), steps=age),) if age else ()
        late = {"halo_exchange": HaloExchangeState(halo_ages=ages)}
        for seed in range(3):
            rates = {"optimizer": {"kind": "adamw", "learning_rate": 0.01}, "seed": seed, "steps": 40}
            halo_ = {"synchronize": 0 if age else 1, "late": True}
            recipe = recipe_of({"kind": "sage", "width": 64, "norm": True}, {"halo": halo_}, precision="fp32", **rates)
            figures = train_recipe(recipe, graph, (25, 50, 75), choices=late)["validation"][-1]
            found[age] += (figures["accuracy"] + figures["test_accuracy"]) / 6
    assert found[0] > found[1] > found[2] > 0.5
