"""Rounds of local steps in plans: of replicas, of workers whose outer parameters are on nodes, or where they pay.

No torch.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster, whatif
from espalier.mechanisms.local_rounds import round_plan as co2
from espalier.mechanisms.local_rounds import rounds_at_nodes
from espalier.mechanisms.local_rounds.options import ByRounds, Eager
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.plan import precision, refusals
from espalier.plan.ask import Ask, PlanDecision
from espalier.plan.base import Plan
from espalier.plan.choice import PlanChoice, Waits
from espalier.plan.collective_time import gpus
from espalier.plan.decide import decide
from espalier.plan.layout_decision import best_layout
from espalier.plan.search import SearchResult
from espalier.recipe import Auto, EveryStep
from espalier.recipe.errors import UserError

FIGURES = tuple(figure * 10.0**power / 8 for power in range(5, 13) for figure in (1, 2, 5))
"""Bandwidths between which rounds begin to pay, bytes/s: 0.1 Mbit/s to 5 Tbit/s."""


FRUGAL = Eager(offload=True), Eager()
"""Rounds that a plan may choose, those that keep least on a device first: where they do not fit, no others do."""


class LocalRoundsChoice(PlanChoice):
    """Replicas that agree by rounds, where that is asked for, or where links leave little else."""

    def alone(self, ask: Ask) -> PlanDecision | None:
        """Rounds that the recipe asks for."""
        options = ask.request.recipe.sync
        if not isinstance(options, ByRounds):
            return None
        rounds = _on_replicas(ask)
        if rounds_at_nodes.asked(ask.request, rounds.cluster):
            return _at_nodes(ask, rounds.cluster, options)
        try:
            return _by_rounds(rounds, options)
        except refusals.DoesNotFit as error:
            raise _refusal(error, rounds) from None

    def candidates(self, ask: Ask, best: PlanDecision) -> Iterator[PlanDecision]:
        """Rounds where they pay; where they cannot be had, the plan says why: they were not asked for."""
        rounds = _on_replicas(ask)
        if not isinstance(ask.request.recipe.sync, Auto) or rounds.cluster.machines == 1 or not best.fits:
            return
        try:
            options, made, apart = _fitting(rounds)
            worth, whole = co2.worth([replica.plan for replica in apart]), _seconds(best)
            if whole >= co2.NOTICED * worth.alone:
                decision = _by_rounds(rounds, options)
                limits = _limits(ask, worth, made, whole)
                why = worth.sentence(whole, made.link, decision.plan, limits)
                taken = decision if worth.pays(whole) else best
                yield taken.changed(why=(why, *taken.plan.why))
        except UserError as error:
            why = f"Rounds of local steps were left out: {error.what}"
            yield best.changed(why=(*best.plan.why, why))

    def part(self, plan: Plan) -> str:
        """How long rounds are."""
        return f"rounds of {plan.state(LocalRoundsState).steps} local steps"

    def waits(self, plan: Plan) -> Iterable[Waits]:
        """For the exchange of a round."""
        words = {"outer": "a step beyond what local steps hide"}
        yield Waits("Agreeing by rounds", words, list(zip(*plan.replicas, strict=True)))


def _fitting(ask: Ask) -> tuple[ByRounds, co2.Replicas, list[PlanDecision]]:
    """The last of `FRUGAL` whose replicas all fit. Raises UserError: none does."""
    fitting = None
    for options in FRUGAL:
        made = co2.cut(ask.request, ask.cluster, options)
        apart = _apart(made, ask)
        if not all(replica.fits for replica in apart):
            break
        fitting = options, made, apart
    if fitting is None:
        raise UserError("no machine can hold a replica by itself.")
    return fitting


def _seconds(decision: PlanDecision) -> float:
    """Of a step of the fastest plan, whichever of a tie was taken."""
    return min(decision.plan.step_seconds, *(option.seconds for option in decision.search_result.options))


def _limits(ask: Ask, worth: co2.Worth, made: co2.Replicas, whole: float) -> tuple[float, float]:
    """The last of `FIGURES` at which rounds pay, 0 where there is none, and the next: the faster the link, the less
    they do."""
    bandwidth, chosen = made.link.bandwidth, worth.pays(whole)
    request = ask.changed(sync=EveryStep()).request

    @cache
    def pays(figure: float) -> bool | None:
        """None: they do not, and no slower link would make them, as one machine takes all steps."""
        if figure == bandwidth or (figure < bandwidth) == chosen:
            return chosen
        other = decide(request, whatif.faster(ask.cluster, figure / bandwidth), ask.calibration)
        alone = len({rank.node for rank in other.plan.ranks}) == 1
        return worth.pays(_seconds(other)) or (None if alone and not worth.pays(other.plan.step_seconds) else False)

    at = max(1, bisect(FIGURES, worth.guess(request, made), hi=len(FIGURES) - 1) - 1)
    while at < len(FIGURES) - 1 and pays(FIGURES[at]):
        at += 1
    while at and pays(FIGURES[at - 1]) is False:
        at -= 1
    last = FIGURES[at - 1] if at and pays(FIGURES[at - 1]) else 0.0
    return (max(last, bandwidth), FIGURES[at]) if chosen else (last, min(FIGURES[at], bandwidth))


def _on_replicas(ask: Ask) -> Ask:
    """On the machines that have the precision."""
    cluster = ask.cluster
    return replace(ask, cluster=precision.machines(cluster, ask.request.precision) if gpus(cluster) else cluster)


def _at_nodes(ask: Ask, replicas: Cluster, options: ByRounds) -> PlanDecision:
    """Rounds of workers whose outer parameters are on optimizer nodes."""
    request, inside = rounds_at_nodes.inside(ask.request, replicas, options)
    decision = best_layout(Ask(request, inside, ask.calibration))
    if not decision.fits:
        return decision
    plan = rounds_at_nodes.joined(decision.plan, ask.request, replicas, options)
    return replace(decision, cluster=replicas, plan=plan)


def _by_rounds(ask: Ask, options: ByRounds) -> PlanDecision:
    """What is kept depends on the codec, which depends on the seconds of a local step: first as asked for; where the
    codec is then a lossy one, that again with what it keeps back."""
    made, parts, rounds = _rounds(ask, options)
    if rounds.codec != options.codec and rounds.lossy:
        options = options.changed(codec=rounds.codec)
        made, parts, rounds = _rounds(ask, options)
    plan = co2.join(parts, made, rounds, options)
    return PlanDecision(ask.request, ask.cluster, SearchResult((), None, 0, 0.0), plan)


def _rounds(ask: Ask, options: ByRounds) -> tuple[co2.Replicas, list[Plan], co2.RoundChoice]:
    """The replicas, a plan of each, and how they agree."""
    made = co2.cut(ask.request, ask.cluster, options)
    parts = [replica.taken for replica in _apart(made, ask)]
    counts = sorted({len(part.ranks) for part in parts})
    if len(counts) > 1:
        raise UserError(
            f"Replicas of {' and '.join(map(str, counts))} ranks cannot agree by rounds.",
            why="each rank exchanges its shard with the same rank of the other replicas",
            do=f"plan.pin.ranks={made.count * counts[0]}",
        )
    step = min(part.predicted.step_seconds if part.predicted else 1.0 for part in parts)
    return made, parts, co2.round_of(options, made, step, 4.0 * ask.request.profile.trainable)


def _apart(made: co2.Replicas, ask: Ask) -> list[PlanDecision]:
    """The decision for each replica by itself, made once for equal ones. Raises UserError when one cannot be had."""
    names = [clusters.dumps(cluster) for cluster in made.clusters]
    unlike = dict(zip(names, made.clusters, strict=True))
    decisions = {name: _replica(Ask(made.request, unlike[name], ask.calibration)) for name in unlike}
    return [decisions[name] for name in names]


def _replica(ask: Ask) -> PlanDecision:
    decision = best_layout(ask)
    if not decision.fits or co2.whole(decision.plan):
        return decision
    return best_layout(replace(ask, request=co2.sharded(ask.request, len(decision.plan.ranks))))


def _refusal(error: refusals.DoesNotFit, ask: Ask) -> refusals.DoesNotFit:
    """The error when no replica fits beside what rounds keep, with the change that keeps nothing where it helps."""
    cost = refusals.planned(ask.changed(sync=EveryStep()).request, ask.cluster)
    advice = [f'sync.kind="every_step", which keeps no outer states ({cost})'] if cost else []
    return refusals.DoesNotFit(error.what, why=error.why, do=refusals.SEPARATOR.join([*advice, error.do]))


CHOICE = LocalRoundsChoice()
