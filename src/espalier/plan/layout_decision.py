"""The best layout for a request: the search, experts over ranks or states elsewhere, and trials that settle near ones.

Replicas agree at every step. No rank is started but by the trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from espalier.machine.cluster import Cluster
from espalier.plan import build_plan, choice, explain, memory_model, pins, refusals, search, trials
from espalier.plan.ask import Ask, PlanDecision, Trials
from espalier.plan.base import RESIDENT, Plan
from espalier.plan.calibration import Calibration
from espalier.plan.collective_time import gpus
from espalier.plan.layout_estimate import fullness, scaled, slowest
from espalier.plan.layouts import view
from espalier.plan.request import Request
from espalier.plan.search import Option, SearchResult
from espalier.recipe import Adamw, units

NEAR = 1.02
"""A tie of trials. Of micro-batches the smallest is taken, which holds least; of ranks the most: processes wait for
each other once a step, threads at every operation, so that a core that is busy elsewhere hurts them more."""
SIZES = (0.5, 2, 4)
"""Micro-batches tried beside the estimate's, as multiples of it."""
CLEARLY = 1.1
"""How many times as long a step must take under Muon for AdamW to be named."""
COMPARED = 16
"""Layouts that are also priced under AdamW."""
TRIED = 3
"""Plans that cut the model and are within the search's tie: tried beside one another, where they can be."""


def best_layout(ask: Ask) -> PlanDecision:
    """The fastest layout that fits, else the one that lacks the fewest bytes. Raises UserError: no layout satisfies all
    that is asked."""
    request, priced = choice.priced(ask)
    decision = _searched(replace(ask, request=replace(request, factors=ask.calibration.factors)))
    profile = decision.request.profile
    on_gpus = profile.on_gpus if gpus(ask.cluster) else {}
    decided = (on_gpus.get(remark, remark) for remark in profile.remarks)
    remarks = (*decided, *priced, *explain.seating(ask.cluster))
    if decision.fits and request.muon and gpus(ask.cluster):
        remarks = (*remarks, *_other_optimizer(decision))
    return decision.changed(why=(*decision.plan.why, *remarks))


def _other_optimizer(decision: PlanDecision) -> Iterator[str]:
    """Where AdamW would clearly take less than Muon, by the layouts that are fastest under Muon."""
    adamw = decision.request.changed(optimizer=Adamw())
    predicted = decision.plan.predicted
    assert predicted is not None
    options = decision.search_result.options[:COMPARED]
    fitting = (option for option in options if fullness(adamw, option.on, option.layout)[1] <= 0)
    least = min((float(slowest(adamw, option.on, option.layout)) for option in fitting), default=math.inf)
    if predicted.step_seconds > CLEARLY * least:
        less = 1 - least / predicted.step_seconds
        taken = units.show_seconds(least)
        yield (
            f"train.optimizer.kind=adamw would take {taken} a step, {less:.0%} less: Muon orthogonalizes whole "
            "matrices. It may need fewer steps."
        )


def _searched(ask: Ask) -> PlanDecision:
    request, cluster, calibration, trials = ask.request, ask.cluster, ask.calibration, ask.trials
    pins.check(request, cluster)
    free = request.pin.shard is None and request.recipe.plan.redundancy == 1
    processor = not gpus(cluster) and len(cluster.devices()) == 1
    result = search.search(request, cluster, calibration, whole=free and processor, below=ask.below)
    over = _over_ranks(ask, _fastest_of((request, result)))
    spread = [pair for pair in over if pair[1].options and request.pin.offload in (None, "none")]
    if spread and (result.options or request.pin.offload == "none"):
        alone = [(request, result)]
        if request.pin.offload is None:
            alone.append(search.elsewhere(request, cluster, result, calibration))
        alone = [pair for pair in alone if pair[1].options] or alone
        request, result, sentences = _expert_ranks(*min(alone, key=_fastest_of), spread)
        request = request.changed(remarks=(*request.profile.remarks, *sentences))
    elif request.pin.offload != "none" and not (request.pin.offload is None and result.options):
        pins.check_offload(request, cluster)
        request, result = search.elsewhere(request, cluster, result, calibration, whole=free and processor)
        if not spread:  # ranks that hold the fewest experts
            away = [search.elsewhere(asked, cluster, searched, calibration) for asked, searched in over[-1:]]
            spread = [pair for pair in away if pair[1].options]
        request, result, sentences = _expert_ranks(request, result, spread)
        request = request.changed(remarks=(*request.profile.remarks, *sentences))
        trials = None  # of states that would be written to begin with
    option = result.best()
    if option is None:
        return _closest(request, cluster, result, calibration)
    if result.whole:
        whole_states = replace(result, options=result.whole)
        return PlanDecision(request, cluster, result, _whole(request, result, whole_states, calibration, trials))
    make = partial(build_plan.make, request, result, calibration=calibration)
    plans = [make(tied) for tied in (_tied(result, option) if trials else [option])]
    plan, measured = _fastest(plans, trials)
    return PlanDecision(request, cluster, result, with_trials(plan, plans, measured))


def _over_ranks(ask: Ask, alone: float) -> list[tuple[Request, SearchResult]]:
    """Searches with experts over ranks. `alone`: seconds of a step with every expert on each rank."""
    below = min(ask.below, alone)
    searches = []
    for count in pins.expert_groups(ask.request, ask.cluster):
        asked = replace(ask.request, ep=count)
        searches.append((asked, search.search(asked, ask.cluster, ask.calibration, below=below)))
        below = min(below, _fastest_of(searches[-1]))
    return searches


def _fastest_of(searched: tuple[Request, SearchResult]) -> float:
    """Seconds of the fastest that was found."""
    return min((option.seconds for option in searched[1].options), default=math.inf)


def _expert_ranks(
    request: Request, whole: SearchResult, spread: Sequence[tuple[Request, SearchResult]]
) -> tuple[Request, SearchResult, tuple[str, ...]]:
    """With every expert on each rank (`whole`; what does not fit waits in host memory or on disk), or spread over
    ranks where that is faster by more than a tie: over few where links are slow, as each token crosses them."""
    if not spread:
        return request, whole, ()
    asked, best = min(spread, key=_fastest_of)
    least = _fastest_of((request, whole))
    taken = _fastest_of((asked, best))
    shown = f"over {asked.ep} ranks {units.show_seconds(taken)}"
    where = "" if request.offload == RESIDENT else " and states that wait outside the devices"
    not_spread = f"with every expert on each rank{where} {units.show_seconds(least)}" if whole.options else ""
    if least <= taken * (1 + whole.tie):
        sentence = f"A step takes {units.show_seconds(least)} with every expert on each rank{where}, spread {shown}."
        return request, whole, (sentence,)
    others = [
        f"over {other.ep} ranks {units.show_seconds(each.options[0].seconds)}"
        for other, each in spread
        if other is not asked
    ]
    compared = ", ".join([*([not_spread] if not_spread else ["every expert on each rank does not fit"]), *others])
    return asked, best, (f"Experts are spread over {asked.ep} ranks: {units.show_seconds(taken)} a step; {compared}.",)


def _tied(result: SearchResult, best: Option) -> list[Option]:
    """`best`, and if it cuts the model also those within the search's tie that do, of as many ranks and threads."""
    if not best.cuts:
        return [best]
    fastest = min(option.seconds for option in result.options)
    near = [
        option
        for option in result.options
        if option.cuts
        and option.seconds <= fastest * (1 + result.tie)
        and _of((best.layout.world, best.layout.threads))(option)
        and option is not best
    ]
    return [best, *sorted(near, key=Option.order)[: TRIED - 1]]


def _fastest(plans: list[Plan], measure: Trials | None) -> tuple[Plan, trials.Measured]:
    """The plan that was fastest in trials (the first of a tie, or of all that nobody tried), and what was measured."""
    measured = {} if measure is None or len(plans) < 2 else measure(plans)
    if not measured:
        return plans[0], {}
    near = NEAR * min(measured.values())
    return next(plan for plan in plans if measured.get(trials.key(plan), math.inf) <= near), measured


def _closest(request: Request, cluster: Cluster, result: SearchResult, calibration: Calibration) -> PlanDecision:
    """The plan that lacks the fewest bytes."""
    if result.closest is None:
        raise refusals.refusal(request, cluster, result)
    plan = build_plan.make(request, result, result.closest, calibration)
    lacks = f"{units.show_size(result.closest.over)} of memory per rank"
    plan = plan.changed(executable=False, missing=lacks)
    return PlanDecision(request, cluster, result, plan, fits=False, refuse=refusals.refusal)


# --- one processor -----------------------------------------------------------------------------------------------
#
# Whole states wherever they fit: what cutting them gains inside one machine is less than what an estimate is wrong by.
# Whether one rank of N threads or N ranks of one thread is faster depends on the model's sizes in ways that no short
# formula catches, and so does the micro-batch: where they can be tried, trials decide.


def _whole(
    request: Request, result: SearchResult, whole_states: SearchResult, calibration: Calibration, measure: Trials | None
) -> Plan:
    """The plan with whole states (`whole_states` has the options): the one tried best, else the best by estimate."""
    make = partial(build_plan.make, request, result, calibration=calibration)
    best = whole_states.best()
    assert best is not None
    divisions = sorted({(option.layout.world, option.layout.threads) for option in whole_states.options})
    options = [option for division in divisions if (option := whole_states.best(_of(division))) is not None]
    tried = [make(option) for option in options]
    measured = {} if measure is None else dict(measure(tried))
    if measured:
        fastest = min(measured.values())
        even = [at for at, plan in enumerate(tried) if measured.get(trials.key(plan), math.inf) <= NEAR * fastest]
        best = options[max(even, key=lambda at: len(tried[at].ranks))]
    elif len(tried) > 1:
        return make(best)
    cuts = [make(option) for option in (_tied(whole_states, best) if measure else [best])]
    plan, ways = _fastest(cuts, measure)
    measured = {**measured, **ways}
    tried = [*tried, *(cuts[1:] if ways else [])]
    sizes = [plan, *(make(option) for option in _other_sizes(whole_states, plan))]
    finer = {} if measure is None else dict(measure(sizes))
    if finer:
        fastest = min(finer.values())
        near = [size for size in sizes if finer.get(trials.key(size), math.inf) <= NEAR * fastest]
        plan = min(near, key=lambda candidate: candidate.micro_batch)
    tried += [candidate for candidate in sizes[1:] if finer]
    return with_trials(plan, tried, {**measured, **finer})


def _of(division: tuple[int, int]) -> Callable[[Option], bool]:
    """Whether an option has so many ranks of so many threads."""
    return lambda option: (option.layout.world, option.layout.threads) == division


def _other_sizes(whole_states: SearchResult, plan: Plan) -> list[Option]:
    """The same ranks with other micro-batches, where these leave memory free."""
    wanted = {int(plan.micro_batch * factor) for factor in SIZES}
    division = len(plan.ranks), plan.ranks[0].threads
    fitting = [
        option
        for option in whole_states.options
        if _of(division)(option)
        and view(option.layout, 1, plan.precision).cut == plan.layout.cut
        and option.layout.recompute == plan.recompute
        and option.layout.micro_batch in wanted
        and option.peak <= memory_model.ROOMY["cpu"] * (option.peak - option.over)
    ]
    return sorted(fitting, key=lambda option: int(option.layout.micro_batch))


def with_trials(plan: Plan, tried: list[Plan], measured: trials.Measured) -> Plan:
    """`plan` with what was measured of it and of those beside it."""
    if not measured or plan.predicted is None:
        return plan
    mine = trials.key(plan)
    tried = [other for other in tried if trials.key(other) in measured]
    others = sorted(
        (other for other in tried if trials.key(other) != mine), key=lambda other: measured[trials.key(other)]
    )
    timed = [(other.layout, other.ranks[0].threads) for other in tried]
    untimed = [runner_up for runner_up in plan.runners_up if (runner_up.layout, runner_up.threads) not in timed]
    return plan.changed(
        predicted=scaled(plan.predicted, measured[mine]),
        why=(trials.sentence([plan, *others], measured), *plan.why),
        runners_up=(*(trials.runner_up(other, plan, measured) for other in others), *untimed),
    )
