"""Halo exchange in plans (Sylvie): the rows that cross when a graph is cut over ranks, over which links, and how long
that takes. No torch.

Ranks of a machine share its link to others: a machine sends what its ranks send to other machines at the link's
bandwidth. Late rows have a step to arrive in.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np

from espalier.kernels import row_widths
from espalier.mechanisms.halo_exchange import halo_bits
from espalier.mechanisms.halo_exchange.state import HaloAge, HaloExchangeState
from espalier.plan.base import AdaptiveRule, Exchange, HaloRows, Plan
from espalier.plan.plan_summary import COMPUTING, link_words, places_of
from espalier.recipe import units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from espalier.graph.workload import GraphWorkload
    from espalier.machine.cluster import Cluster

Level = Literal["inside", "between"]
HALOS = "Halos"
"""How sentences about rows that cross begin."""
ALL_BITS = 32
HIDDEN = 0.25
"""Of computing: what rows that a rank waits for may take, where the plan gives them bits."""


def _computing(plan: Plan) -> float:
    """Seconds of a step in which ranks compute; 0 where nothing is predicted."""
    return 0.0 if plan.predicted is None else sum(plan.predicted.terms.get(name, 0.0) for name in COMPUTING)


def _alone(plan: Plan, instead_of: Plan | None) -> Plan:
    """One rank has all of the graph."""
    compared = ""
    if instead_of is not None:
        ranks, show = len(instead_of.trainers), units.show_seconds
        compared = (
            f"; over {ranks} ranks a step would take {show(instead_of.step_seconds)}, here "
            f"{show(plan.step_seconds)}, by estimate (plan.pin.ranks={ranks} cuts it anyway)"
        )
    return plan.changed(why=(f"{HALOS}: one rank has the whole graph, none cross{compared}.", *plan.why))


def with_whole_graph(plan: Plan, others: Sequence[tuple[str, Plan, int]]) -> Plan:
    """The plan whose ranks pass over the whole graph, which says so, and what the options that would cut it are worth:
    they are not taken where the recipe does not ask for them. `others`: an option, its plan, and the steps of a pass
    over the training nodes; without them nothing is said where there is one rank."""
    if len(plan.trainers) == 1 and not any(
        steps * other.step_seconds < plan.step_seconds for _, other, steps in others
    ):
        return plan
    who = "one rank" if len(plan.trainers) == 1 else f"each of {len(plan.trainers)} ranks"
    took = f", in {units.show_seconds(plan.step_seconds)}" if others else ""
    each = [
        f"with {option} {units.show_seconds(steps * other.step_seconds)} on {units.plural(len(other.trainers), 'rank')}"
        for option, other, steps in others
    ]
    sentence = (
        f"{HALOS}: none cross; {who} passes over the whole graph in every step{took}. [graph.halo] cuts it into a part "
        "for each rank, with the same results to rounding where there is no dropout; graph.fanout=auto chooses between "
        "parts, drawn batches and "
        f"one rank{'. By estimate a pass over the training nodes takes ' * bool(each)}{', '.join(each)}."
    )
    return plan.changed(why=(sentence, *plan.why))


def _with_bits(plan: Plan, halos: Any, cluster: Cluster) -> tuple[Plan, Any]:
    """The plan with the bits of each layer, direction and pair of machines, and these by crossing and ranks: what
    crosses in `HIDDEN` of computing, with late rows in all of it, with the least error."""
    ranks, size = plan.trainer_ranks, halos.value_bytes(plan.precision)
    shares = [rank.samples for rank in ranks]
    counts = halos.counts(shares)
    if not any(rows.any() for rows in counts.values()):
        sentence = (
            f"{HALOS}: none cross between hidden layers, so there are no bits to choose (graph.halo.bits = auto)."
        )
        every = {key: np.full(rows.shape, ALL_BITS) for key, rows in counts.items()}
        return plan.changed(why=(sentence, *plan.why)), every
    limit = _computing(plan) * (HIDDEN if halos.options.synchronize == 1 else 1.0)
    places = [place.rank for place in places_of(plan, cluster)]
    each = [[cluster.link(a, b) if a != b else None for b in places] for a in places]
    known = [link for row in each for link in row if link is not None]
    waits = halos.exchanges * max((link.latency + link.launch for link in known), default=0.0)
    bandwidth = np.array([[np.inf if link is None else link.bandwidth for link in row] for row in each])
    links = halo_bits.Links(np.array([rank.node for rank in ranks]), bandwidth)
    coded = links.seconds(halos.coded_bytes(shares, size))
    allotment = halo_bits.allotted(
        counts, lambda key, bits: halos.crossing_bytes(shares, size, key, bits), links, limit - waits - coded
    )
    crossing = _exchanges(allotment, counts, links)
    used = sorted({int(width) for key, bits in allotment.items() for width in np.unique(bits[counts[key] > 0])})
    words = units.plural(used[0], "bit") if len(used) == 1 else f"{used[0]} to {used[-1]} bits"
    sentence = (
        f"{HALOS}: {words}, by layer, direction and link those of the least error that cross in "
        f"{units.show_seconds(limit)} (graph.halo.bits = auto){_most(allotment, counts)}."
    )
    return plan.changed(exchanges=(*plan.exchanges, *crossing), why=(sentence, *plan.why)), allotment


def _most(allotment: Any, counts: Any) -> str:
    """In words, the bits by layer and direction, where they differ."""
    widths = {
        f"layer {layer + 1}'s {'gradients' if backward else 'rows'}": sorted(
            {int(width) for width in bits[counts[layer, backward] > 0]}
        )
        for (layer, backward), bits in allotment.items()
    }
    if len({tuple(used) for used in widths.values()}) < 2:
        return ""
    return ": " + ", ".join(
        f"{name} {'-'.join(map(str, (used[0], used[-1])[: len(used)]))}" for name, used in widths.items()
    )


CODECS = {ALL_BITS: "exact"}
"""Names in plans; of others int and the bits."""


def _exchanges(allotment: Any, counts: Any, links: halo_bits.Links) -> tuple[Exchange, ...]:
    """As few entries of the plan as say it."""
    nodes, made = links.nodes.tolist(), []
    levels: tuple[tuple[Level, Any], ...] = (("inside", ~links.far), ("between", links.far))
    for level, mask in levels:
        bits: dict[Any, dict[tuple[int, int], int]] = {}
        for key, pair_bits in allotment.items():
            places = np.argwhere(mask & (counts[key] > 0)).tolist()
            bits[key] = {(nodes[a], nodes[b]): int(pair_bits[a, b]) for a, b in places}
        every = {width for pairs in bits.values() for width in pairs.values()}
        if len(every) == 1:
            (width,) = every
            made.append(Exchange(traffic="halo", level=level, codec=CODECS.get(width, f"int{width}")))
            continue
        for (layer, backward), pairs in bits.items():
            for width in sorted(set(pairs.values())):
                alike = len(set(pairs.values())) == 1
                among = (
                    () if alike else tuple(sorted(pair for pair, pair_width in pairs.items() if pair_width == width))
                )
                rows = HaloRows(layer=layer, backward=backward, nodes=among)
                made.append(Exchange(traffic="halo", level=level, codec=CODECS.get(width, f"int{width}"), rows=rows))
    return tuple(made)


def beside_batches(plan: Plan, other: Plan, drawn: GraphWorkload) -> Plan:
    """The plan with a sentence on `other`, of a pass over the training nodes in drawn batches: what is computed
    then is something else, so it is not taken by itself."""
    option, steps = batches_of(drawn)
    sentence = (
        f"{HALOS}: in drawn batches ({option} without [graph.halo]) a pass over the training nodes makes "
        f"{units.plural(steps, 'step')} in {units.show_seconds(steps * other.step_seconds)} on "
        f"{units.plural(len(other.trainers), 'rank')}, by estimate."
    )
    return plan.changed(why=(sentence, *plan.why))


def batches_of(drawn: GraphWorkload) -> tuple[str, int]:
    """The options of drawn batches, and how many are a pass over the training nodes."""
    assert drawn.recipe.graph is not None
    option = f"graph.fanout={list(drawn.recipe.graph.fanouts)} train.batch_tokens={drawn.global_batch}"
    return option, -(-drawn.whole_task.items // drawn.global_batch)


class _Ages(NamedTuple):
    """Of late rows: `stale` [ranks, ranks], how many steps old they may be, the most of these, and what the rows that
    are fresh in every step take, in seconds."""

    stale: Any
    most: int = 1
    fresh: float = 0.0


def _with_ages(plan: Plan, halos: Any, cluster: Cluster, sent: Any) -> tuple[Plan, _Ages]:
    """The plan with how old rows may be, by pair of machines, where there are several. Fastest first, those are fresh
    in every step that together take no longer than `HIDDEN` of computing; of others the age is the fewest steps in
    which they cross, `staleness` at most. An age of more than one hides latency alone: links carry every step's bytes.
    """
    options, node = halos.options, np.array([rank.node for rank in plan.trainer_ranks])
    one_step = _Ages(np.full(sent.shape, int(options.synchronize != 1)))
    if options.synchronize == 1 or not sent.any() or plan.predicted is None:
        return plan, one_step
    computing = _computing(plan)
    places, machines = np.array([place.rank for place in places_of(plan, cluster)]), sorted(set(node.tolist()))
    pairs, busy = {}, np.zeros(node.max() + 1)
    for a, b in itertools.combinations_with_replacement(machines, 2):
        out, back = sent[np.ix_(node == a, node == b)], sent[np.ix_(node == b, node == a)]
        size = float(out.sum(1).max() if a == b else max(out.sum(), back.sum()))
        if size:
            ends = set(places[(node == a) | (node == b)].tolist())
            link = cluster.slowest(ends, "inside" if a == b else "between")
            pairs[a, b] = size / link.bandwidth, halos.exchanges * (link.latency + link.launch)
    apart = [(pair, transfer) for pair, (transfer, _) in pairs.items() if pair[0] != pair[1]]
    pace = max(computing, *(sum(transfer for pair, transfer in apart if machine in pair) for machine in machines))
    known, delay = [], 0.0
    for (a, b), (transfer, wait) in sorted(pairs.items(), key=lambda entry: sum(entry[1])):
        steps = int(np.clip(np.ceil((transfer + wait) / pace), 1, options.staleness))
        taken = busy[[a, b]] + transfer
        if len(machines) > 1 and taken.max() + max(delay, wait) <= HIDDEN * computing:
            steps, busy[[a, b]], delay = 0, taken, max(delay, wait)
        known.append(HaloAge(nodes=(a, b), steps=steps))
    ages = {frozenset(age.nodes): age.steps for age in known}
    if set(ages.values()) == {1}:
        return plan, one_step
    stale = np.array([[ages.get(frozenset((a, b)), 1) for b in node.tolist()] for a in node.tolist()])
    pair_ages = _Ages(stale, max(1, *ages.values()), float(busy.max()) + delay)
    why = (*_said_ages(known, pair_ages.fresh), *plan.why)
    return plan.with_state(HaloExchangeState(halo_ages=tuple(known))).changed(why=why), pair_ages


def _said_ages(known: list[HaloAge], seconds: float) -> list[str]:
    """In sentences."""
    sentences, fresh = [], [age.nodes for age in known if age.steps == 0]
    if any(a == b for a, b in fresh):
        sentences.append(
            f"{HALOS} of ranks of the same machine are fresh in every step, in {units.show_seconds(seconds)}."
        )
    for steps in sorted({age.steps for age in known}):
        which = [f"{a}-{b}" for a, b in (age.nodes for age in known if age.steps == steps) if a != b]
        if which and steps != 1:
            how = "fresh in every step" if steps == 0 else f"up to {steps} steps old"
            sentences.append(f"{HALOS} between machines {', '.join(which)} are {how}.")
    return sentences


def _said_bits(options: Any, by_peer: Any) -> tuple[int, str]:
    """The fewest bits of a value, and all of them in words."""
    if options.by_degree:
        return options.bits, f"{_by_degree(options.bits)} a value by degree"
    every = [options.bits] if by_peer is None else [int(width) for bits in by_peer.values() for width in bits.flat]
    low, high = min(every, default=ALL_BITS), max(every, default=ALL_BITS)
    if low < high:
        return low, f"{low} to {high} bits a value"
    return low, f"{units.plural(low, 'bit')} a value" if low < ALL_BITS else "values as they are"


def _by_degree(bits: int) -> str:
    """The bits of rows by in-degree, in words."""
    every = [str(width) for width in row_widths.levels(bits)]
    return f"{', '.join(every[:-1])} and {every[-1]} bits" if len(every) > 1 else f"{bits} bits"


def _rules(options: Any, bits: int) -> tuple[list[AdaptiveRule], list[str]]:
    """What the bits of a row follow from besides links, and rows that are late, in sentences too: the node
    (`graph.halo.by_degree`), losses (`graph.halo.adapt`)."""
    rules, sentences = [], []
    if options.by_degree:
        rules.append(AdaptiveRule(name="graph.halo.by_degree", start=bits, low=bits, high=8, signal="in-degree"))
        share = {2: "half", 3: "third", 4: "quarter"}.get(len(row_widths.levels(bits)))
        each = f", a {share} of the rows for a peer each, the lowest degrees first" if share else ""
        sentences.append(f"{HALOS}: rows have {_by_degree(bits)} by the in-degree of their node{each}.")
    if options.adapt:
        rules += [
            AdaptiveRule(name="graph.halo.bits", start=bits, low=1, high=8, signal="speed of the loss"),
            AdaptiveRule(name="graph.halo.late", start=1, low=0, high=1, signal="speed of the loss"),
        ]
        lowest = " of the lowest degrees" if options.by_degree else ""
        sentences.append(
            f"{HALOS}: bits{lowest} begin at {bits} and follow how fast the loss changes, from 1 to 8; where it slows "
            "down rows are fresh; see the log."
        )
    return rules, sentences


def with_halos(plan: Plan, halos: Any, cluster: Cluster, instead_of: Plan | None = None) -> Plan:
    """The plan with the bytes and seconds of its exchanges, in sentences too; each rank takes its part at once.
    `instead_of`: a plan of several ranks that is slower than this one."""
    if len(plan.trainers) == 1:
        return _alone(plan, instead_of)
    ranks = plan.trainer_ranks
    shares = [rank.samples for rank in ranks]
    plan = plan.changed(micro_batch=max(shares))
    size = halos.value_bytes(plan.precision)
    options, node = halos.options, np.array([rank.node for rank in ranks])
    far, by_peer = node[:, None] != node[None], cast("Any", None)
    if options.bits == "auto":
        plan, by_peer = _with_bits(plan, halos, cluster)
    sent = np.asarray(halos.step_bytes(shares, size, by_peer))
    plan, ages = _with_ages(plan, halos, cluster, sent)
    level, crossing = ("between", sent * far) if far.any() else ("inside", sent)
    devices = {place.rank for place in places_of(plan, cluster)}
    link = cluster.slowest(devices, "between" if far.any() else "inside")
    groups = node if far.any() else np.arange(len(ranks))
    most = max(crossing[groups == group].sum() for group in set(groups.tolist()))
    delay = halos.exchanges * (link.latency + link.launch)
    wait, stale = float(most) / link.bandwidth + delay, crossing * (ages.stale > 0)
    words, show = link_words(link, "between" if level == "between" else "inside"), units.show_size
    bits, low = _said_bits(options, by_peer)
    sentences = [f"{HALOS}: {halos.told(shares)}, {show(float(sent.sum(1).max()))} leave a rank in a step ({low})."]
    exposed, predicted = wait, plan.predicted
    if predicted is not None:
        computing = _computing(plan)
        late = 0.0 if options.synchronize == 1 else 1 - 1 / options.synchronize if options.synchronize else 1.0
        flying = max(float(stale[groups == group].sum()) for group in set(groups.tolist())) / link.bandwidth
        beyond = max(flying, (flying + delay * bool(flying)) / ages.most) - computing
        exposed = wait if late == 0 else (1 - late) * wait + late * max(0.0, beyond) + ages.fresh
        alone = computing * len(ranks)
        predicted = predicted.longer("halo", exposed)
        predicted = predicted.changed(sent_bytes={**predicted.sent_bytes, halos.traffic: float(sent.sum(1).max())})
        if alone < predicted.step_seconds:
            sentences.append(
                f"{HALOS}: one rank would be faster, {units.show_seconds(alone)} a step by estimate: plan.pin.ranks=1."
            )
    hidden = "" if not ages.stale.any() else f", {units.show_seconds(exposed)} of them beyond computing"
    stale = (
        "every step waits for fresh rows"
        if not ages.stale.any()
        else f"rows are {'one step' if ages.most == 1 else f'up to {ages.most} steps'} late"
        + (f", and every {options.synchronize}th step waits for fresh ones" if options.synchronize else "")
    )
    sentences.append(f"{HALOS} take {units.show_seconds(wait)} of a step over {words}{hidden}; {stale}.")
    exact = options.bits == ALL_BITS and halos.most_ranks is None  # queries, keys and values always are
    if exact and exposed > 0.5 * (predicted.step_seconds if predicted else 0.0) > 0:
        sentences.append(f"{HALOS} take most of the step: graph.halo.bits=1 sends about a 28th of the bytes.")
    rules, ruled = _rules(options, bits)
    why, rules = (*sentences, *ruled, *plan.why), [*plan.rules, *rules]
    return plan.changed(predicted=predicted, rules=tuple(rules), why=why)
