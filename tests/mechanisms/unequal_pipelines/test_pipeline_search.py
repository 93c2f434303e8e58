"""The search for pipelines of unequal devices, beside brute force."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import dataclass

import pytest
from tests.mechanisms.unequal_pipelines.flashflex_costs import Card, ReleasedCosts

from espalier.mechanisms.unequal_pipelines.pipeline_search import Search, fastest_path, partitions, place
from espalier.mechanisms.unequal_pipelines.pipeline_solver import (
    DeviceClass,
    Group,
    Slot,
    SolvedPipeline,
    StageRate,
    share_micro_batches,
    solve_layers,
)
from espalier.recipe.errors import UserError

NOTE = [DeviceClass("A100", 0, 3), DeviceClass("4090", 1, 3), DeviceClass("3090", 2, 2)]
CARDS = [Card(312, 80, 200), Card(165.2, 24, 2), Card(80, 24, 2)]


def released(micro_batches: int = 12) -> ReleasedCosts:
    """The cluster that the released scheduler was run on: LLaMA-7B, 24 sequences in micro-batches of 2."""
    return ReleasedCosts(NOTE, CARDS, 0.5, 32, micro_batches, 2)


def tokens_per_second(seconds: float) -> float:
    return 24 * 4096 / seconds


# --- the yardstick itself ---


def test_the_released_cost_model_gives_its_published_seconds() -> None:
    costs = released()
    assert [round(1e3 * costs.layer(Group(kind)), 2) for kind in range(3)] == [45.46, 85.85, 177.29]
    assert round(1e3 * costs.layer(Group(0, 2)), 3) == 22.729 + 1.875
    # the plan of the released scheduler, in its own model
    order = [Group(1), Group(1), Group(1), Group(0, 2), Group(0), Group(2), Group(2)]
    layers = [2, 2, 2, 15, 7, 2, 2]
    stages = [
        n * costs.layer(one) + (costs.send(one, order[at + 1]) if at + 1 < len(order) else 0.0)
        for at, (one, n) in enumerate(zip(order, layers, strict=True))
    ]
    fixed, each = costs.profile(stages)
    assert tokens_per_second(costs.step(fixed + 12 * each, 0.0)) == pytest.approx(6134.5, rel=0.01)


def test_the_released_memory_model_gives_its_published_sizes() -> None:
    costs, one, two = released(), Group(0), Group(0, 2)
    first, middle, last = Slot(0, 7), Slot(3, 7), Slot(6, 7)
    stages = ((one, first, 2), (two, middle, 15), (one, middle, 7), (one, last, 2))
    assert [round(costs.held(*stage), 4) for stage in stages] == [4.3516, 11.8438, 11.0625, 4.2266]


def test_the_worked_example_is_beaten_with_some_devices_and_with_all() -> None:
    costs = released()
    best = place(NOTE, costs)
    assert tokens_per_second(best.seconds) >= 8150
    assert best.unused  # the three A100s alone are faster than all eight devices
    search = Search(NOTE, costs)
    everything = min(
        found.seconds
        for parts in partitions(search.there)
        if tuple(map(sum, zip(*parts, strict=True))) == search.there and (found := search.layout(parts)) is not None
    )
    assert tokens_per_second(everything) >= 6618
    assert all(seconds >= best.seconds for seconds in best.with_unused.values())


# --- the exact parts ---


def test_layers_are_those_of_brute_force() -> None:
    draw = random.Random(0)
    for _ in range(150):
        stages, layers = draw.randint(1, 4), draw.randint(1, 9)
        rates = [
            StageRate(
                draw.choice([0.5, 1.0, draw.random() + 0.1]), draw.choice([0.0, draw.random()]), draw.randint(0, 9)
            )
            for _ in range(stages)
        ]
        weight = draw.choice([0.0, 1.0, 3.0, 20.0])

        def objective(found: tuple[int, ...], rates: list[StageRate] = rates, weight: float = weight) -> float:
            times = [one.extra + n * one.layer for one, n in zip(rates, found, strict=True)]
            return sum(times) + weight * max(times)

        every = [one for one in itertools.product(*(range(1, rate.most + 1) for rate in rates)) if sum(one) == layers]
        found = solve_layers(layers, rates, weight)
        assert (found is None) == (not every)
        if found is not None:
            assert sum(found) == layers
            assert all(1 <= n <= one.most for n, one in zip(found, rates, strict=True))
            assert objective(found) == pytest.approx(min(map(objective, every)), rel=1e-9)


def test_shares_are_those_of_brute_force() -> None:
    draw = random.Random(1)
    for _ in range(100):
        profiles = [(draw.choice([0.0, 3 * draw.random()]), draw.random() + 0.05) for _ in range(draw.randint(1, 3))]
        count = draw.randint(1, 9)
        found = share_micro_batches(profiles, count)
        every = [one for one in itertools.product(range(1, count + 1), repeat=len(profiles)) if sum(one) == count]
        assert (found is None) == (not every)
        if found is not None:
            ends = [max(f + n * e for (f, e), n in zip(profiles, one, strict=True)) for one in every]
            assert sum(found) == count
            assert max(f + n * e for (f, e), n in zip(profiles, found, strict=True)) == pytest.approx(min(ends))


def test_a_path_crosses_the_fastest_links() -> None:
    draw = random.Random(2)
    for _ in range(30):
        nodes = list(range(draw.randint(2, 6)))
        table = {pair: draw.choice([1.0, 2.0, 5.0, draw.random()]) for pair in itertools.permutations(nodes, 2)}

        def cost(path: tuple[int, ...], table: dict[tuple[int, ...], float] = table) -> tuple[float, float]:
            steps = [table[one] for one in itertools.pairwise(path)]
            return max(steps), round(sum(steps), 9)

        assert cost(fastest_path(nodes, table)) == min(map(cost, itertools.permutations(nodes)))


def test_partitions_are_each_there_once() -> None:
    assert sum(1 for _ in partitions((1,) * 4)) == 52 - 1  # Bell(5), less the empty one
    found = [tuple(one) for one in partitions((3, 2))]
    assert len(found) == len(set(found))


# --- the whole search ---


@dataclass(frozen=True)
class RandomCosts:
    """A cluster and a model drawn from a seed; of every second one sends are hidden."""

    classes: list[DeviceClass]
    speeds: list[float]
    memory: list[int]
    slow: float
    layers: int
    micro_batches: int
    tensor: float
    gradients: float
    awaits_sends: bool = True

    @classmethod
    def drawn(cls, seed: int, devices: int) -> RandomCosts:
        draw = random.Random(seed)
        kinds = draw.randint(1, 3)
        counts = [1] * kinds
        for _ in range(draw.randint(kinds, devices) - kinds):
            counts[draw.randrange(kinds)] += 1
        layers = draw.randint(4, 12)
        return cls(
            [DeviceClass(f"k{n}", draw.randrange(kinds), count) for n, count in enumerate(counts)],
            [draw.choice([1.0, 2.0, 4.0]) * (0.9 + 0.2 * draw.random()) for _ in counts],
            [draw.randint(max(1, layers // 3), 2 * layers) for _ in counts],
            draw.choice([0.0, 0.1, 1.0]),
            layers,
            draw.randint(4, 24),
            draw.choice([0.05, 0.3]),
            draw.choice([0.0, 0.5, 5.0]),
            seed % 2 == 0,
        )

    def degrees(self, kind: int) -> list[int]:
        return [one for one in (1, 2, 4) if one <= self.classes[kind].devices]

    def layer(self, group: Group) -> float:
        return (1.0 + self.tensor * (group.tensor - 1)) / self.speeds[group.kind] / group.tensor

    def extra(self, group: Group, slot: object) -> float:
        return 0.3 * slot.last / self.speeds[group.kind]  # type: ignore[attr-defined]

    def send(self, group: Group, following: Group) -> float:
        return self.slow * (self.classes[group.kind].machine != self.classes[following.kind].machine)

    def most_layers(self, group: Group, slot: object) -> int:
        return max(0, self.memory[group.kind] * group.tensor - slot.first - slot.last)  # type: ignore[attr-defined]

    def profile(self, seconds: list[float]) -> tuple[float, float]:
        return sum(seconds) - max(seconds), max(seconds)

    def sync(self, pipelines: tuple[SolvedPipeline, ...]) -> float:
        machines = {self.classes[stage.group.kind].machine for one in pipelines for stage in one.stages}
        return self.gradients * (len(pipelines) > 1) * (1.0 + self.slow * (len(machines) > 1))

    def step(self, pipelines: float, sync: float) -> float:
        return pipelines + sync


class Enumeration:
    """The fastest step of every partition, every order of stages, every tensor group."""

    def __init__(self, costs: RandomCosts) -> None:
        self.costs, self.search = costs, Search(costs.classes, costs)
        self.known: dict[tuple[int, ...], list[SolvedPipeline]] = {}

    def groups(self, kind: int, count: int, most: int = 8) -> list[tuple[Group, ...]]:
        if count == 0:
            return [()]
        fitting = [one for one in self.costs.degrees(kind) if one <= min(most, count)]
        return [(Group(kind, one), *rest) for one in fitting for rest in self.groups(kind, count - one, one)]

    def pipelines(self, counts: tuple[int, ...]) -> list[SolvedPipeline]:
        """Those that no other beats for every number of micro-batches, with layers for three shares."""
        if counts not in self.known:
            found = {}
            for parts in itertools.product(*(self.groups(kind, count) for kind, count in enumerate(counts))):
                orders = set(itertools.permutations(sum(parts, ())))
                for order, weight in itertools.product(orders, {0.0, 2.0, 1.0 * self.costs.micro_batches}):
                    one = self.search.in_order(order, weight) if len(order) <= self.costs.layers else None
                    if one is not None:
                        found[round(one.fixed, 9), round(one.each, 9)] = one
            self.known[counts] = [
                one
                for at, one in found.items()
                if not any(f <= at[0] and e <= at[1] and (f, e) != at for f, e in found)
            ]
        return self.known[counts]

    def best(self) -> float:
        best = math.inf
        for parts in partitions(self.search.there):
            for chosen in itertools.product(*map(self.pipelines, parts)):
                shares = share_micro_batches([(one.fixed, one.each) for one in chosen], self.costs.micro_batches)
                if shares is not None:
                    slowest = max(one.fixed + n * one.each for one, n in zip(chosen, shares, strict=True))
                    best = min(best, slowest + self.costs.sync(chosen))
        return best


def near_enumeration(seed: int, devices: int) -> None:
    costs = RandomCosts.drawn(seed, devices)
    best = Enumeration(costs).best()
    if math.isinf(best):
        with pytest.raises(UserError, match="layers"):
            place(costs.classes, costs)
        return
    found = place(costs.classes, costs)
    assert found.seconds <= 1.02 * best
    for kind, one in enumerate(costs.classes):  # never slower than the best of one class alone
        alone = Search([each if n == kind else each._replace(devices=0) for n, each in enumerate(costs.classes)], costs)
        layouts = [made for parts in partitions(alone.there) if (made := alone.layout(parts)) is not None]
        assert all(found.seconds <= made.seconds * (1 + 1e-9) for made in layouts), one
    for pipeline in found.pipelines:
        assert sum(stage.layers for stage in pipeline.stages) == costs.layers
    assert sum(one.micro_batches for one in found.pipelines) == costs.micro_batches


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(one, marks=pytest.mark.slow) for one in range(4, 12))])
def test_small_clusters_are_placed_as_by_enumeration(seed: int) -> None:
    near_enumeration(seed, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_clusters_of_eight_devices_are_placed_as_by_enumeration(seed: int) -> None:
    near_enumeration(seed, 8)


def test_equal_devices_get_equal_pipelines() -> None:
    costs = RandomCosts([DeviceClass("k", 0, 4)], [1.0], [99], 0.0, 8, 8, 0.3, 0.1)
    found = place(costs.classes, costs)
    assert [(len(one.stages), one.micro_batches) for one in found.pipelines] == [(1, 2)] * 4


def test_the_same_cluster_gives_the_same_layout() -> None:
    assert place(NOTE, released()) == place(NOTE, released())


@dataclass(frozen=True)
class Sites(RandomCosts):
    """Machines of one device in sites of four; links between sites are slow."""

    def send(self, group: Group, following: Group) -> float:
        return 0.01 if group.kind % 3 == following.kind % 3 else self.slow


def test_machines_of_three_sites_get_a_pipeline_for_each_site() -> None:
    """A machine holds a quarter of the model, so each pipeline needs four: along fast links, not across slow ones."""
    classes = [DeviceClass(f"k{n}", n, 1) for n in range(12)]
    costs = Sites(classes, [1.0] * 12, [6] * 12, 20.0, 16, 24, 0.3, 0.5)
    found = place(classes, costs)
    assert found == place(classes, costs)
    assert {frozenset(stage.group.kind % 3 for stage in one.stages) for one in found.pipelines} == {
        frozenset([site]) for site in range(3)
    }
    assert not found.unused


def test_sixty_four_devices_of_six_classes_take_seconds() -> None:
    counts = (16, 16, 8, 8, 8, 8)
    classes = [DeviceClass(f"k{n}", n, count) for n, count in enumerate(counts)]
    cards = [
        Card(80, 24, 2),
        Card(312, 80, 200),
        Card(165, 24, 2),
        Card(165, 24, 50),
        Card(80, 24, 2),
        Card(312, 40, 200),
    ]
    costs = ReleasedCosts(classes, cards, 0.5, 32, 256, 1)
    begun = time.process_time()
    found = place(classes, costs)
    assert time.process_time() - begun < 8  # bench/flashflex.py measures it: two seconds on a machine of one's own
    alone = [
        min((made.seconds for n in (1, 2, 4, 8, 16) if (made := _alone(classes, costs, kind, n))), default=math.inf)
        for kind in range(6)
    ]
    assert found.seconds <= min(alone)


def _alone(classes: list[DeviceClass], costs: ReleasedCosts, kind: int, parts: int) -> object:
    each = tuple(classes[kind].devices // parts if n == kind else 0 for n in range(len(classes)))
    return Search(classes, costs).layout([each] * parts) if any(each) else None


def test_nothing_to_place_on_is_said() -> None:
    with pytest.raises(UserError, match="no devices"):
        place([], released())
    small = ReleasedCosts(NOTE, [Card(312, 1, 200)] * 3, 0.5, 32, 12, 2)
    with pytest.raises(UserError, match="32 layers"):
        place(NOTE, small)
