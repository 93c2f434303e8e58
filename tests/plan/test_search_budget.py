"""A search whose seconds are over gives the best so far and says so; one that has found nothing that fits goes on."""

from __future__ import annotations

import itertools

import pytest
from asked import decoder, gpus

from espalier.plan import search, search_budget
from espalier.plan.ask import PlanDecision
from espalier.plan.decide import decide
from espalier.plan.request import Request


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every batch of layouts takes a second."""
    clock = itertools.count()
    monkeypatch.setattr(search_budget, "CLOCK", lambda: float(next(clock)))


def asked(seconds: float, layers: int = 8, **more: object) -> Request:
    recipe = decoder(2048, layers, 1024, 64, precision="bf16", **more)
    return recipe.changed(seconds=seconds)


def line(decision: PlanDecision) -> str:
    """What the plan says of the seconds; empty: nothing."""
    return "".join(sentence for sentence in decision.plan.why if "plan.seconds" in sentence)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("machines", [2, 16])
def test_a_search_that_is_cut_off_prices_fewer_layouts_and_says_so(ticks: None, machines: int) -> None:
    cluster = gpus("H100", machines)
    whole, cut = (decide(asked(seconds), cluster) for seconds in (1e6, 3))
    assert (whole.cut_off, line(whole)) == (False, "")
    assert cut.fits
    assert cut.cut_off
    assert cut.search_result.priced < whole.search_result.priced
    assert cut.plan.step_seconds >= whole.plan.step_seconds
    assert "after plan.seconds = 3, with " in line(cut)
    assert "% of " in line(cut)
    assert "Another machine" in line(cut)


def test_more_seconds_price_more_layouts_up_to_the_whole_search(ticks: None) -> None:
    cluster = gpus("H100", 2)
    priced = [decide(asked(seconds), cluster).search_result.priced for seconds in (0, 4, 8, 1000, 10**6)]
    assert priced == sorted(priced)
    assert priced[0] < priced[1] < priced[-1] == priced[-2]


def test_the_answer_is_the_same_whenever_the_seconds_suffice() -> None:
    cluster = gpus("H100", 4)
    plans = [decide(asked(seconds), cluster).plan for seconds in (1e3, 1e6)]
    assert plans[0] == plans[1]


def test_without_a_plan_that_fits_the_search_goes_on(ticks: None) -> None:
    """Whole states do not fit: the first that does comes late. And where nothing does, everything is priced."""
    cluster = gpus("A100-40GB")
    late = search_of(asked(0, layers=80), cluster)
    assert late.options
    assert late.priced < search_of(asked(1e9, layers=80), cluster).priced
    never = decide(asked(0, layers=4000), cluster)
    assert not never.fits
    assert not never.cut_off
    assert never.search_result.priced == decide(asked(1e9, layers=4000), cluster).search_result.priced


def search_of(request: Request, cluster: object) -> search.SearchResult:
    with search_budget.started(request.recipe.plan.seconds):
        return search.search(request, cluster)


def test_decisions_inside_a_decision_share_its_seconds() -> None:
    with search_budget.started(5.0) as outer, search_budget.started(7.0) as inner:
        assert inner is None
        assert search_budget.current() is outer
    assert search_budget.current() is not outer
