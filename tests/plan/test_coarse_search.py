"""The coarse search finds what pricing every layout finds on few ranks, and loses next to nothing on many."""

from __future__ import annotations

import random
from typing import Any

import pytest
from asked import decoder, gpus
from test_search import random_case

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.plan import coarse_search, search
from espalier.plan.request import Request
from espalier.plan.search import SearchResult
from espalier.recipe import Pin, defaults, recipe_file
from espalier.train import request_from_recipe

MOST_LOST = 0.01
"""Of the seconds of a step."""
SLOW = [pytest.param(first, marks=pytest.mark.slow) for first in range(8, 200, 24)]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The search with every layout priced up to so many ranks."""

    def made(request: Request, cluster: Cluster, exhaustive: int, below: float = float("inf")) -> search.SearchResult:
        monkeypatch.setattr(coarse_search, "EXHAUSTIVE", exhaustive)
        return search.search(request, cluster, below=below)

    return made


def large_case(seed: int) -> tuple[Request, Cluster]:
    """72 to 1,024 ranks, and a model that mostly fits."""
    draw = random.Random(seed)
    kind = draw.choice(["A100-80GB", "A100-40GB", "H100", "V100-32GB"])
    machines = draw.choice([9, 12, 16, 20, 25, 32, 48, 64, 100, 128])
    cluster = gpus(kind, machines, 8, f"{draw.choice([25, 100, 400, 3200])}Gbit/s")
    width, layers = draw.choice([2048, 4096, 8192]), draw.choice([16, 24, 60, 80])
    batch = 8 * machines * draw.choice([1, 2, 8]) + draw.choice([0, 0, 24])
    return decoder(width, layers, draw.choice([1024, 4096]), batch).changed(precision="bf16"), cluster


def mixed_case(seed: int) -> tuple[Request, Cluster]:
    """72 to 192 ranks on two kinds of devices, about a sample for each."""
    draw = random.Random(seed)
    machines = draw.choice([9, 12, 16, 24])
    first = draw.randrange(1, machines)
    kinds = draw.sample(["A100-80GB", "A100-40GB", "H100", "L40S"], 2)
    tables = [
        f'[[nodes]]\ndevice = "{kind}"\ndevices = 8\ncount = {count}\n'
        for kind, count in zip(kinds, (first, machines - first), strict=True)
    ]
    links = f'[links]\nbetween = "{draw.choice([100, 400, 3200])}Gbit/s"\n'
    batch = 8 * machines * draw.choice([1, 2]) + draw.choice([0, 0, 24])
    request = decoder(draw.choice([2048, 3072]), draw.choice([16, 27]), draw.choice([2048, 8192]), batch)
    return request.changed(precision="bf16"), clusters.loads("".join([*tables, links]))


@pytest.mark.parametrize(
    ("first", "count"), [(0, 4), *(pytest.param(at, 32, marks=pytest.mark.slow) for at in range(4, 200, 32))]
)
def test_on_few_ranks_the_coarse_search_finds_what_pricing_every_layout_finds(
    searched: Any, first: int, count: int
) -> None:
    for seed in range(first, first + count):
        request, cluster = random_case(seed)
        every, coarse = searched(request, cluster, 64), searched(request, cluster, 0)
        assert bool(every.options) == bool(coarse.options), seed
        if every.options:
            assert coarse.options[0].seconds == every.options[0].seconds, seed
            assert coarse.best().layout == every.best().layout, seed
        elif every.closest is not None:
            assert coarse.closest is not None
            assert coarse.closest.over == every.closest.over, seed


def nearly_as_fast(searched: Any, request: Request, cluster: Cluster) -> tuple[SearchResult, SearchResult]:
    """Of every layout priced and of the coarse search, which is asserted to lose at most a hundredth."""
    every, coarse = searched(request, cluster, 10**9), searched(request, cluster, 64)
    assert bool(every.options) == bool(coarse.options)
    if every.options:
        assert coarse.options[0].seconds <= (1 + MOST_LOST) * every.options[0].seconds
    return every, coarse


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "count"),
    [
        (0, 1),
        pytest.param(1, 2, marks=pytest.mark.slow),
        *(pytest.param(p.values[0], 24, marks=pytest.mark.slow) for p in SLOW),
    ],
)
def test_on_many_ranks_it_loses_at_most_a_hundredth(searched: Any, first: int, count: int) -> None:
    for seed in range(first, first + count):
        every, coarse = nearly_as_fast(searched, *large_case(seed))
        if every.options:
            assert coarse.best().seconds <= (1 + MOST_LOST) * every.best().seconds * (1 + every.tie), seed


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "count"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.slow),
        *(pytest.param(p.values[0], 24, marks=pytest.mark.slow) for p in SLOW),
    ],
)
def test_where_devices_differ_it_loses_at_most_a_hundredth(searched: Any, first: int, count: int) -> None:
    for seed in range(first, first + count):
        nearly_as_fast(searched, *mixed_case(seed))


@pytest.mark.slow
def test_shares_by_speed_are_found_among_many_ranks(searched: Any) -> None:
    """No search of whole models alone finds a faster plan, though with equal shares they are not among the best."""
    table = {
        "model": {"width": 3072, "depth": 27, "heads": 24, "kv_heads": 4, "vocabulary": 32000, "context": 4096},
        "data": {"path": "python:stdlib"},
        "train": {"steps": 10, "sequence": 4096, "batch_tokens": 96 * 4096, "precision": "bf16"},
    }
    request = request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0])
    cluster = clusters.loads(
        '[[nodes]]\ndevice = "H100"\ndevices = 8\ncount = 2\n[[nodes]]\ndevice = "L40S"\ndevices = 8\ncount = 10\n'
        '[links]\nbetween = "3200Gbit/s"\n'
    )
    whole = searched(request.changed(pin=Pin(algorithm="data", pp=1)), cluster, 64).options[0]
    assert whole.shares == (2, 1)
    assert searched(request, cluster, 64).options[0].seconds <= (1 + MOST_LOST) * whole.seconds


def test_up_to_64_ranks_every_layout_is_priced_and_beyond_few_of_them(searched: Any) -> None:
    request, few, many = decoder(4096, 32, 2048, 1024), gpus("H100", 8, 8), gpus("H100", 128, 8)
    assert searched(request, few, 64).priced == searched(request, few, 10**9).priced
    assert searched(request, many, 64).priced < searched(request, many, 10**9).priced / 2


@pytest.mark.parametrize("machines", [125, *(pytest.param(count, marks=pytest.mark.slow) for count in (1250, 12500))])
def test_layouts_priced_on_very_many_ranks_are_bounded(searched: Any, machines: int) -> None:
    request = decoder(8192, 120, 8192, 4 * machines).changed(precision="bf16")
    result = searched(request, gpus("H100", machines, 8, "3200Gbit/s"), 64)
    assert result.options
    assert result.priced < 3_000_000


def test_what_cannot_beat_a_plan_that_is_there_is_not_searched_on_many_ranks(searched: Any) -> None:
    request, cluster = decoder(4096, 32, 2048, 512).changed(precision="bf16"), gpus("H100", 16, 8)
    fastest = searched(request, cluster, 64)
    again = searched(request, cluster, 64, fastest.options[0].seconds)
    assert again.options[0].seconds == fastest.options[0].seconds
    assert max(option.layout.world for option in searched(request, cluster, 64, 1e-9).options) <= 64
    assert max(option.layout.world for option in fastest.options) > 64
