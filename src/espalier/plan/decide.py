"""One decision for one question: the plan of a request on a cluster, whoever asks. Starts no rank.

`espalier plan`, `espalier train`, `make_plan` and planning anew while a run goes on all end here. In order: replicas by
rounds or agreement at every step, codecs by the links, the search, trials on a processor, how often to save, and what
copies in memory take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.mechanisms.codecs import planned as codecs
from espalier.mechanisms.halo_exchange import planned as halo_exchange
from espalier.mechanisms.local_rounds import planned as co2
from espalier.mechanisms.local_rounds import rounds_at_nodes
from espalier.mechanisms.task_waves import task_waves
from espalier.mechanisms.unequal_pipelines import flashflex_json, unequal
from espalier.plan import (
    build_plan,
    checkpoint_cost,
    explain,
    memory_model,
    pins,
    plan_summary,
    precision,
    refusals,
    search,
    trials,
)
from espalier.plan.base import RESIDENT, Plan
from espalier.plan.calibrate import DATASHEET, Calibration
from espalier.plan.collective_time import gpus
from espalier.plan.estimate import scaled
from espalier.plan.layouts import view
from espalier.plan.request import AUTO, Request
from espalier.plan.search import Found, Option
from espalier.recipe import Auto, ByRounds, Eager, units
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from espalier.graph.workload import GraphWorkload

NEAR = 1.02
"""A tie of trials. Of micro-batches the smallest is taken, which holds least; of ranks the most: processes wait for
each other once a step, threads at every operation, so that a core that is busy elsewhere hurts them more."""
SIZES = (0.5, 2, 4)
"""Micro-batches tried beside the estimate's, as multiples of it."""

Trials = Callable[[Sequence[Plan]], trials.Measured]
"""Seconds of a step of each plan, measured; empty where nothing was."""
TRIED = 3
"""Plans that cut the model and are within the search's tie: tried beside one another, where they can be."""


@dataclass(frozen=True)
class PlanDecision:
    """What the search found, and the plan: the best, or where `fits` is False the one that lacks the fewest bytes."""

    request: Request
    cluster: Cluster
    found: Found
    plan: Plan
    fits: bool = True

    @property
    def taken(self) -> Plan:
        """The plan, if it can be trained. Raises UserError: see `refusal`."""
        if not self.fits:
            raise self.refusal()
        return self.plan

    def refusal(self) -> UserError:
        """Why there is nothing to train with."""
        return refusals.refusal(self.request, self.cluster, self.found)


def decide(
    request: Request, cluster: Cluster, calibration: Calibration = DATASHEET, trials: Trials | None = None
) -> PlanDecision:
    """The plan of `request` on `cluster`, in the precision that makes it fastest, where the recipe says none.

    Args:
        calibration: what measurements say of the coefficients.
        trials: what settles ranks, threads and micro-batch of a processor, and between cut plans; None: estimates do.

    Raises:
        UserError: pins that cannot be met. (That nothing fits is said by `PlanDecision.taken`.)
    """
    if request.parts and task_waves.ranks_of(request, cluster) > 1:
        found = decide(*task_waves.alone(request, cluster), calibration)
        return replace(found, cluster=cluster, plan=task_waves.with_waves(found.plan, request, cluster), fits=True)
    there = gpus(cluster)
    if request.precision == AUTO and there:
        return _in_the_fastest_precision(request, cluster, calibration, trials)
    if request.precision == AUTO:
        return _as_measured(request, cluster, calibration, trials)
    replicas = precision.machines(cluster, request.precision) if there else cluster
    if isinstance(request.sync, ByRounds) and rounds_at_nodes.asked(request, replicas):
        found = _every_step(*rounds_at_nodes.inside(request, replicas, request.sync), calibration)
        if found.fits:
            joined = rounds_at_nodes.joined(found.plan, request, replicas, request.sync)
            found = replace(found, cluster=cluster, plan=joined)
    elif isinstance(request.sync, ByRounds):
        try:
            found = _by_rounds(request, replicas, calibration, request.sync)
        except refusals.DoesNotFit as error:
            raise refusals.of_rounds(error, request, replicas) from None
    else:
        found = _or_unequal(_every_step(request, cluster, calibration, trials), calibration)
        if isinstance(request.sync, Auto) and replicas.machines > 1 and found.fits:
            found = _if_rounds_pay(found, request, replicas, calibration)
    plan = _with_graph(found, request, cluster, calibration, trials)
    plan = plan.changed(rules=(*plan.rules, *request.rules))
    plan = checkpoint_cost.paced(plan, request.saves, cluster, request.write_rate)
    plan = checkpoint_cost.with_copies(plan, request.copies, cluster)
    told = plan_summary.sentences(plan, cluster if plan.outer is None else replicas)
    why = (*told, *plan.why, *(precision.faster(request, found.found) if there else ()))
    return replace(found, plan=plan.changed(why=why))


def _with_graph(
    found: PlanDecision, request: Request, cluster: Cluster, calibration: Calibration, measure: Trials | None
) -> Plan:
    """What a graph adds: features that wait on disk, and rows that cross; one rank instead of several where that is
    faster than their exchange, in trials where both can be tried."""
    plan = found.plan
    if request.stored is not None:
        from espalier.mechanisms.disk_batches import packed_features  # loads torch

        plan = packed_features.with_levels(plan, request.stored, cluster)
    if request.halos is None or not found.fits:
        if request.whole_graph is None or plan.outer is not None or len(plan.trainers) == cluster.machines == 1:
            return plan
        return halo_exchange.with_whole_graph(plan, _instead_of_whole(request, cluster, calibration))
    most = request.halos.most_ranks
    if most is not None and len(plan.trainers) > most and request.pin.ranks is None:
        fewer = replace(request, pin=request.pin.changed(ranks=most))
        plan = _every_step(fewer, cluster, calibration).plan
    plan = _beside_batches(plan, request, cluster, calibration)
    several = halo_exchange.with_halos(plan, request.halos, cluster)
    if len(plan.trainers) == 1 or request.pin.ranks is not None or isinstance(request.sync, ByRounds):
        return several
    try:
        alone = _every_step(replace(request, pin=request.pin.changed(ranks=1)), cluster, calibration)
    except UserError:  # of machines that are named each has a rank
        return several
    if not alone.fits:
        return several
    both = [alone.plan, several]
    measured = measure(both) if measure is not None else {}
    tried = (trials.told(both, measured),) if measured else ()
    one, more = (measured.get(trials.key(each), halo_exchange.seconds(each)) for each in both)
    if one >= more:
        return several.changed(why=(*tried, *several.why))
    alone = replace(alone, plan=alone.plan.changed(why=(*tried, *alone.plan.why)))
    beside = _beside_batches(alone.plan, request, cluster, calibration)
    return halo_exchange.with_halos(beside, request.halos, cluster, instead_of=several)


def _instead_of_whole(request: Request, cluster: Cluster, calibration: Calibration) -> list[tuple[str, Plan, int]]:
    """See `halo_exchange.with_whole_graph`, by estimates."""
    assert request.whole_graph is not None
    made = request.whole_graph.cut()
    if made is None:
        return []
    asked = replace(request, halos=made.halos(), anatomy=made.anatomy, whole_graph=None)
    try:
        parts = decide(asked, cluster, calibration)
    except UserError:  # more ranks are asked for than there are nodes
        return []
    found = [("[graph.halo]", parts.plan, 1)] if parts.fits else []
    if (other := _batches(asked, cluster, calibration)) is not None:
        option, steps = halo_exchange.batches_of(other[0])
        found.append((option, other[1], steps))
    return found


def _beside_batches(plan: Plan, request: Request, cluster: Cluster, calibration: Calibration) -> Plan:
    """The plan with a sentence on drawn batches, where a network could train on them instead."""
    found = _batches(request, cluster, calibration)
    return plan if found is None else halo_exchange.beside_batches(plan, found[1], found[0])


def _batches(request: Request, cluster: Cluster, calibration: Calibration) -> tuple[GraphWorkload, Plan] | None:
    """Drawn batches that a network over parts could train on instead, and their plan."""
    sampled = getattr(request.halos, "sampled", None)
    if sampled is None:
        return None
    drawn = sampled()
    pin = request.pin.changed(micro_batch=None)
    asked = replace(request, halos=None, anatomy=drawn.anatomy, global_batch=drawn.global_batch, pin=pin)
    found = _every_step(asked, cluster, calibration)
    return (drawn, found.plan) if found.fits else None


def _in_the_fastest_precision(
    request: Request, cluster: Cluster, calibration: Calibration, trials: Trials | None
) -> PlanDecision:
    """The fastest decision of those for each precision that could be fastest; where devices differ, also for one that
    all have, to say what leaving some out gains. Raises UserError where none can be made."""
    made: list[PlanDecision] = []
    refusal: UserError | None = None
    for name in precision.candidates(cluster):
        asked, best = replace(request, precision=name), min(map(_rank, made), default=(True, 0.0))
        known = cluster.same_speed or any(precision.with_all(one.found) is not None for one in made)
        if not best[0] and known and search.fastest_possible(asked, cluster, calibration) >= best[1]:
            continue
        try:
            made.append(decide(asked, cluster, calibration, trials))
        except UserError as error:
            refusal = refusal or error
    if not made and refusal is not None:
        raise refusal
    best_of = min(made, key=_rank)
    others = {one.request.precision: one.found for one in made if one is not best_of}
    why = (*best_of.plan.why, *precision.reasons(best_of.plan, cluster, others))
    return replace(best_of, plan=best_of.plan.changed(why=why))


def _as_measured(request: Request, cluster: Cluster, calibration: Calibration, measure: Trials | None) -> PlanDecision:
    """On processors: fp32, or bf16 where trials of the same ranks and micro-batch say that it is faster."""
    plain = (*request.remarks, precision.ON_PROCESSORS)
    found = decide(replace(request, precision="fp32", remarks=plain), cluster, calibration, measure)
    exact = found.plan
    if measure is None or not (found.fits and precision.worth_trying(cluster)) or exact.outer is not None:
        return found
    alike = {"ranks": len(exact.ranks), "threads": exact.ranks[0].threads, "micro_batch": exact.micro_batch}
    pin = request.pin.changed(**alike, recompute=exact.recompute)
    try:
        low = decide(replace(request, precision="bf16", pin=pin), cluster, calibration)
    except UserError:
        return found
    same = low.fits and low.plan.layout.changed(precision="fp32") == exact.layout
    measured = measure([exact, low.plan]) if same else {}
    if not measured or measured[trials.key(exact)] < precision.FASTER * measured[trials.key(low.plan)]:
        return found
    return replace(low, plan=_told(low.plan, [low.plan, exact], measured))


def _rank(found: PlanDecision) -> tuple[bool, float]:
    """What fits, then what is fastest; of what does not, what lacks the fewest bytes."""
    if not found.fits:
        return True, 0.0 if found.found.closest is None else found.found.closest.over
    return False, 0.0 if found.plan.predicted is None else found.plan.predicted.step_seconds


# --- rounds ------------------------------------------------------------------------------------------------------


def _if_rounds_pay(found: PlanDecision, request: Request, cluster: Cluster, calibration: Calibration) -> PlanDecision:
    """Rounds instead, where the links between machines leave little else; where they cannot be had, the plan says why:
    they were not asked for."""
    try:
        made = co2.cut(request, cluster, Eager())
        apart = _apart(made, calibration)
        if not all(one.fits for one in apart):
            raise UserError("no machine can hold a replica by itself.")
        told = co2.pays(found.plan, [one.plan for one in apart], made)
        if not told:
            return found
        rounds = _by_rounds(request, cluster, calibration, Eager())
        return replace(rounds, plan=rounds.plan.changed(why=(told, *rounds.plan.why)))
    except UserError as error:
        why = f"Rounds of local steps were left out: {error.what}"
        return replace(found, plan=found.plan.changed(why=(*found.plan.why, why)))


def _apart(made: co2.Replicas, calibration: Calibration) -> list[PlanDecision]:
    """The decision for each replica by itself, made once for equal ones. Raises UserError when one cannot be had."""
    known: dict[str, PlanDecision] = {}
    found = []
    for one in made.clusters:
        name = clusters.dumps(one)
        if name not in known:
            known[name] = _alone(made.request, one, calibration)
        found.append(known[name])
    return found


def _alone(request: Request, cluster: Cluster, calibration: Calibration) -> PlanDecision:
    found = _every_step(request, cluster, calibration)
    if not found.fits or co2.whole(found.plan):
        return found
    return _every_step(co2.sharded(request, len(found.plan.ranks)), cluster, calibration)


def _by_rounds(request: Request, cluster: Cluster, calibration: Calibration, options: ByRounds) -> PlanDecision:
    """What is kept depends on the codec, which depends on the seconds of a local step: first as asked for; where the
    codec is then a lossy one, that again with what it keeps back."""
    made, parts, rounds = _rounds(request, cluster, calibration, options)
    if rounds.codec != options.codec and rounds.lossy:
        options = options.changed(codec=rounds.codec)
        made, parts, rounds = _rounds(request, cluster, calibration, options)
    plan = co2.join(parts, made, rounds, options)
    return PlanDecision(request, cluster, Found((), None, 0, 0.0), plan)


def _rounds(
    request: Request, cluster: Cluster, calibration: Calibration, options: ByRounds
) -> tuple[co2.Replicas, list[Plan], co2.RoundChoice]:
    """The replicas, a plan of each, and how they agree."""
    made = co2.cut(request, cluster, options)
    parts = [one.taken for one in _apart(made, calibration)]
    counts = sorted({len(part.ranks) for part in parts})
    if len(counts) > 1:
        raise UserError(
            f"Replicas of {' and '.join(map(str, counts))} ranks cannot agree by rounds.",
            why="each rank exchanges its shard with the same rank of the other replicas",
            do=f"plan.pin.ranks={made.count * counts[0]}",
        )
    step = min(part.predicted.step_seconds if part.predicted else 1.0 for part in parts)
    return made, parts, co2.round_of(options, made, step, 4.0 * request.trainable)


# --- at every step -----------------------------------------------------------------------------------------------


def _every_step(
    request: Request, cluster: Cluster, calibration: Calibration, trials: Trials | None = None
) -> PlanDecision:
    request, told = codecs.encoded(request, cluster)
    request = replace(request, factors=calibration.factors)
    found = _searched(request, cluster, calibration, trials)
    remarks = (*found.request.remarks, *told, *explain.seating(cluster))
    why = (*found.plan.why, *remarks)
    return replace(found, plan=found.plan.changed(why=why))


def _or_unequal(found: PlanDecision, calibration: Calibration) -> PlanDecision:
    """Pipelines of unequal depth instead, where devices differ and these are faster, or the only ones that fit; or
    those of a file."""
    request, cluster = replace(found.request, factors=calibration.factors), found.cluster
    asked = request.pin.pipelines or "unless slower"
    if asked not in ("unless slower", "equal", "unequal"):
        made = flashflex_json.layout(flashflex_json.read(asked), request, cluster, asked)
        return _taken(found, unequal.plan_of(*made), (f"The pipelines are those of {asked}.",))
    wanted, why_not = asked == "unequal", unequal.asked(request, cluster)
    best = None if why_not else unequal.best(request, cluster)
    if best is None:
        told = f"Unequal pipelines are not possible here: {why_not or 'none of them fits'}."
        return _taken(found, found.plan, (told,)) if wanted and found.fits else found
    plan = unequal.plan_of(*best)
    refused = None if request.refuses is None else request.refuses(plan)
    equal = found.plan.predicted.step_seconds if found.fits and found.plan.predicted is not None else None
    slower = equal is not None and best[1].seconds * unequal.FASTER > equal
    if refused is not None or (slower and not wanted):
        return found
    beside = "" if equal is None else f"With the best equal layout a step takes {units.show_seconds(equal)}."
    why = (*plan.why[:1], *((beside,) if beside else ()), *plan.why[1:], *request.remarks)
    return replace(found, plan=plan.changed(why=why), fits=True)


def _taken(found: PlanDecision, plan: Plan, told: tuple[str, ...]) -> PlanDecision:
    return replace(found, plan=plan.changed(why=(*told, *plan.why)), fits=True)


def _searched(request: Request, cluster: Cluster, calibration: Calibration, trials: Trials | None) -> PlanDecision:
    pins.check(request, cluster)
    free = request.pin.shard is None and request.redundancy == 1
    processor = not gpus(cluster) and len(cluster.devices()) == 1
    found = search.search(request, cluster, calibration, whole=free and processor)
    spread = _over_ranks(request, cluster, calibration)
    if spread and (found.options or request.pin.offload == "none"):
        alone = [(request, found)]
        if request.pin.offload is None:
            alone.append(search.elsewhere(request, cluster, found, calibration))
        alone = [one for one in alone if one[1].options] or alone
        request, found, told = _expert_ranks(*min(alone, key=_fastest_of), spread)
        request = replace(request, remarks=(*request.remarks, *told))
    elif request.pin.offload != "none" and not (request.pin.offload is None and found.options):
        pins.check_offload(request, cluster)
        request, found = search.elsewhere(request, cluster, found, calibration, whole=free and processor)
        request, found, told = _expert_ranks(request, found, spread)
        request = replace(request, remarks=(*request.remarks, *told))
        trials = None  # of states that would be written to begin with
    option = found.best()
    if option is None:
        return _closest(request, cluster, found, calibration)
    if found.whole:
        kept = replace(found, options=found.whole)
        return PlanDecision(request, cluster, found, _whole(request, found, kept, calibration, trials))
    make = partial(build_plan.make, request, found, calibration=calibration)
    plans = [make(one) for one in (_tied(found, option) if trials else [option])]
    plan, measured = _fastest(plans, trials)
    return PlanDecision(request, cluster, found, _told(plan, plans, measured))


def _over_ranks(request: Request, cluster: Cluster, calibration: Calibration) -> list[tuple[Request, Found]]:
    """Searches with experts over ranks, where nobody said over how many and that can run: over all ranks of a machine,
    and over 2, 4 and so on. Ranks of one processor gain nothing: one rank has its memory and threads."""
    pin, places = request.pin, _ranks_of(request, cluster)
    cut = pin.shard is not None and max(pin.shard.params or 1, pin.shard.grads or 1) > 1
    if not request.experts or pin.ep is not None or cut or request.compile or len(cluster.devices()) == 1:
        return []
    most = min(request.experts, request.global_batch)
    counts = {2, 4, 8, 16, 32, 64, places, *(table.devices for table in cluster.nodes)}
    found = []
    for count in sorted(one for one in counts if 1 < one <= most and places % one == 0):
        asked = replace(request, ep=count)
        found.append((asked, search.search(asked, cluster, calibration)))
    return [one for one in found if one[1].options]


def _fastest_of(searched: tuple[Request, Found]) -> float:
    """Seconds of the fastest that was found."""
    return min((one.seconds for one in searched[1].options), default=math.inf)


def _ranks_of(request: Request, cluster: Cluster) -> int:
    """Ranks that a plan of the whole cluster has."""
    return request.pin.ranks or gpus(cluster) or len(cluster.devices())


def _expert_ranks(
    request: Request, whole: Found, spread: Sequence[tuple[Request, Found]]
) -> tuple[Request, Found, tuple[str, ...]]:
    """With every expert on each rank (`whole`; what does not fit waits in host memory or on disk), or spread over
    ranks where that is faster by more than a tie: over few where links are slow, as each token crosses them."""
    if not spread:
        return request, whole, ()
    asked, best = min(spread, key=_fastest_of)
    least, taken = _fastest_of((request, whole)), _fastest_of((asked, best))
    shown = f"over {asked.ep} ranks {units.show_seconds(taken)}"
    where = "" if request.offload == RESIDENT else " and states that wait outside the devices"
    here = f"with every expert on each rank{where} {units.show_seconds(least)}" if whole.options else ""
    if least <= taken * (1 + whole.tie):
        told = f"A step takes {units.show_seconds(least)} with every expert on each rank{where}, spread {shown}."
        return request, whole, (told,)
    others = [
        f"over {one.ep} ranks {units.show_seconds(each.options[0].seconds)}" for one, each in spread if one is not asked
    ]
    beside = ", ".join([*([here] if here else ["every expert on each rank does not fit"]), *others])
    return asked, best, (f"Experts are spread over {asked.ep} ranks: {units.show_seconds(taken)} a step; {beside}.",)


def _tied(found: Found, best: Option) -> list[Option]:
    """`best`, and if it cuts the model also those within the search's tie that do, of as many ranks and threads."""
    if not best.cuts:
        return [best]
    fastest = min(one.seconds for one in found.options)
    near = [
        one
        for one in found.options
        if one.cuts
        and one.seconds <= fastest * (1 + found.tie)
        and _of((best.layout.world, best.layout.threads))(one)
        and one is not best
    ]
    return [best, *sorted(near, key=Option.order)[: TRIED - 1]]


def _fastest(plans: list[Plan], measure: Trials | None) -> tuple[Plan, trials.Measured]:
    """The plan that was fastest in trials (the first of a tie, or of all that nobody tried), and what was measured."""
    measured = {} if measure is None or len(plans) < 2 else measure(plans)
    if not measured:
        return plans[0], {}
    least = min(measured[trials.key(one)] for one in plans)
    return next(one for one in plans if measured[trials.key(one)] <= NEAR * least), measured


def _closest(request: Request, cluster: Cluster, found: Found, calibration: Calibration) -> PlanDecision:
    """The plan that lacks the fewest bytes."""
    if found.closest is None:
        raise refusals.refusal(request, cluster, found)
    plan = build_plan.make(request, found, found.closest, calibration)
    lacks = f"{units.show_size(found.closest.over)} of memory per rank"
    return PlanDecision(request, cluster, found, plan.changed(executable=False, missing=lacks), False)


# --- one processor -----------------------------------------------------------------------------------------------
#
# Whole states wherever they fit: what cutting them gains inside one machine is less than what an estimate is wrong by.
# Whether one rank of N threads or N ranks of one thread is faster depends on the model's sizes in ways that no short
# formula catches, and so does the micro-batch: where they can be tried, trials decide.


def _whole(request: Request, found: Found, kept: Found, calibration: Calibration, measure: Trials | None) -> Plan:
    """The plan with whole states (`kept` has the options): the one tried best, else the best by estimate."""
    make = partial(build_plan.make, request, found, calibration=calibration)
    best = kept.best()
    assert best is not None
    divisions = sorted({(one.layout.world, one.layout.threads) for one in kept.options})
    options = [one for division in divisions if (one := kept.best(_of(division))) is not None]
    tried = [make(one) for one in options]
    measured = {} if measure is None else dict(measure(tried))
    if measured:
        fastest = min(measured.values())
        even = [at for at, one in enumerate(tried) if measured[trials.key(one)] <= NEAR * fastest]
        best = options[max(even, key=lambda at: len(tried[at].ranks))]
    elif len(tried) > 1:
        return make(best)
    cuts = [make(one) for one in (_tied(kept, best) if measure else [best])]
    plan, ways = _fastest(cuts, measure)
    measured, tried = {**measured, **ways}, [*tried, *(cuts[1:] if ways else [])]
    sizes = [plan, *(make(one) for one in _other_sizes(kept, plan))]
    finer = {} if measure is None else dict(measure(sizes))
    if finer:
        fastest = min(finer.values())
        near = [one for one in sizes if finer[trials.key(one)] <= NEAR * fastest]
        plan = min(near, key=lambda one: one.micro_batch)
    tried += [one for one in sizes[1:] if finer]
    return _told(plan, tried, {**measured, **finer})


def _of(division: tuple[int, int]) -> Callable[[Option], bool]:
    """Whether an option has so many ranks of so many threads."""
    return lambda one: (one.layout.world, one.layout.threads) == division


def _other_sizes(kept: Found, plan: Plan) -> list[Option]:
    """The same ranks with other micro-batches, where these leave memory free."""
    wanted = {int(plan.micro_batch * factor) for factor in SIZES}
    division = len(plan.ranks), plan.ranks[0].threads
    fitting = [
        one
        for one in kept.options
        if _of(division)(one)
        and view(one.layout, 1, plan.precision).cut == plan.layout.cut
        and one.layout.recompute == plan.recompute
        and one.layout.micro_batch in wanted
        and one.peak <= memory_model.ROOMY["cpu"] * (one.peak - one.over)
    ]
    return sorted(fitting, key=lambda one: int(one.layout.micro_batch))


def _told(plan: Plan, tried: list[Plan], measured: trials.Measured) -> Plan:
    """`plan` with what was measured of it and of those beside it."""
    if not measured or plan.predicted is None:
        return plan
    mine = trials.key(plan)
    others = sorted((one for one in tried if trials.key(one) != mine), key=lambda one: measured[trials.key(one)])
    timed = [(one.layout, one.ranks[0].threads) for one in tried]
    untimed = [one for one in plan.runners_up if (one.layout, one.threads) not in timed]
    return plan.changed(
        predicted=scaled(plan.predicted, measured[mine]),
        why=(trials.told([plan, *others], measured), *plan.why),
        runners_up=(*(trials.beside(one, plan, measured) for one in others), *untimed),
    )
