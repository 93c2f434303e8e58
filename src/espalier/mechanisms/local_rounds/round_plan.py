"""Which replicas a run is cut into, how many steps a round has, and what travels. After CO2, arXiv 2401.16265, which
gives no rule for the number of steps: here it is the least that hides the exchange
(`mechanisms.local_rounds.cost.least_steps`).

A replica is a machine (or what `sync.replicas` says), planned by itself for its share of the batch; within one, the
optimizer's state is cut among all its ranks, so that each sends only what it owns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from espalier.comm import compressed_collectives
from espalier.comm.codecs import codec
from espalier.machine.cluster import Cluster, Link
from espalier.mechanisms.local_rounds import cost
from espalier.mechanisms.local_rounds.co2 import chosen_of, refuse_pieces
from espalier.mechanisms.local_rounds.fragment import cut as cut_sizes
from espalier.mechanisms.local_rounds.options import ByRounds, Co2
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.optim.diloco_slowmo import METHODS, WARM, OuterMethod, defaults_of
from espalier.plan import collective_time
from espalier.plan.axes import offload
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.axes.sharding import owned, refreshed
from espalier.plan.base import AdaptiveRule, Exchange, Plan, Predicted, Rank
from espalier.plan.collective_time import DeviceGroup
from espalier.plan.compose import Refusal
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layouts import of_view
from espalier.plan.request import Request
from espalier.recipe import EveryStep, ShardPin, units
from espalier.recipe.errors import UserError

SLOW, ALONE = 3.0, 0.75
"""With sync.kind = "auto", rounds are chosen where the best that agrees at every step takes so many times as long as a
replica's own step; or that share of as many times as there are replicas, which is what one of them would take for all.
Less is better bought with codecs, which change less of what is learned."""
NOTICED = 1.05
"""From so many times on a plan says what rounds would take."""
MOST = 500
"""Steps of a round at most: DiLoCo's (arXiv 2311.08105), the longest that is published to work."""
LONG = 50
"""Steps of a round up to which what travels is not rounded more: the shortest rounds of DiLoCo's comparison (arXiv
2311.08105, 50 to 2,000), in which longer ones learn less."""
WAITING = 0.05
"""Share of a round that a method which waits for its exchange may wait."""
LEARNS = (
    'sync.kind = "co2" in a run of {rounds}: {warm} at the beginning wait for their exchange and are used at once, the '
    "others come a round late. Measured (docs/measured/rounds.md): after 250 rounds of 8 steps the loss is 6.5 % above "
    "that of an exchange at every step, 1.1 % above Local SGD's. It is not known to be within 1 % of an exchange at "
    'every step for any number of rounds, so sync.kind = "auto" never chooses it.'
)
"""Of CO2 in a plan."""
CODECS = "int8", "int4"
"""What may travel instead of full precision, the mildest first."""


@dataclass(frozen=True)
class Replicas:
    """A run's replicas: machines (or parts of one) as clusters of their own, and one replica's request."""

    clusters: Sequence[Cluster]
    request: Request
    link: Link

    @property
    def count(self) -> int:
        """How many replicas."""
        return len(self.clusters)


def cut(request: Request, cluster: Cluster, options: ByRounds) -> Replicas:
    """The replicas of a run. Raises UserError: fewer than two, or a batch or ranks that they cannot share equally."""
    machines = cluster.machines
    count = options.replicas or (machines if machines > 1 else request.pin.ranks or 1)
    refuse_single(count)
    if machines > 1 and count != machines:
        raise UserError(f"sync.replicas = {count}, and there are {machines} machines.", do=f"sync.replicas={machines}")
    if request.profile.global_batch % count:
        near = -(-request.profile.global_batch // count) * count
        raise UserError(
            f"A batch of {request.profile.global_batch} samples cannot be shared equally by {count} replicas.",
            do=f"a batch of {near} samples (train.batch_tokens)",
        )
    pin = request.pin
    if pin.ranks is not None and pin.ranks % count:
        raise UserError(
            f"plan.pin.ranks = {pin.ranks} is no multiple of {count} replicas.", do=f"plan.pin.ranks={count}"
        )
    replica_ranks = None if pin.ranks is None else pin.ranks // count
    inner = request.changed(
        global_batch=request.profile.global_batch // count,
        pin=pin.changed(ranks=replica_ranks),
        sync=EveryStep(),
        outer=_kept(options, cluster),
        crossings={},
        refuses=None if request.refuses is None else partial(_refused, request.refuses, method_of(options)),
    )
    link = cluster.slowest(range(len(cluster.devices())), "between") if machines > 1 else cluster.nodes[0].inside
    return Replicas(_machines(cluster, count), inner, link)


def refuse_single(replicas: int) -> None:
    """Raises UserError for fewer than two."""
    if replicas < 2:
        raise UserError(
            "Synchronization by rounds needs two replicas, and the cluster has one machine.",
            do="sync.replicas=2, --hosts for more machines, or sync.kind=every_step",
        )


def _kept(options: ByRounds, cluster: Cluster) -> float:
    """Copies of what a rank moves that the outer engine keeps on its device."""
    name = method_of(options)
    chosen = chosen_of(name, settings_of(options, options.codec or METHODS[name].codec))
    on_host = not collective_time.gpus(cluster)
    return 0.0 if chosen.offload and not on_host else cost.copies(chosen, on_host)


def _refused(refuses: Callable[[Plan], Refusal | None], method: str, plan: Plan) -> Refusal | None:
    """Why two replicas that are each `plan` cannot agree by rounds; None: they can."""
    ranks = len(plan.ranks)
    replicas = tuple(range(ranks)), tuple(range(ranks, 2 * ranks))
    doubled = plan.with_state(LocalRoundsState(replicas=replicas, method=method))
    return refuses(doubled.changed(ranks=plan.ranks * 2))


def _machines(cluster: Cluster, count: int) -> list[Cluster]:
    if cluster.machines == count:
        clusters = []
        for machine in range(count):
            places = [place for place in cluster.devices() if place.node == machine]
            tables = {id(place.table): place.table for place in places}
            nodes = tuple(
                table.changed(count=1, devices=sum(place.table is table for place in places))
                for table in tables.values()
            )
            alone = {"between": None, "pairs": (), "optimizers": (), "standbys": ()}
            clusters.append(cluster.changed(nodes=nodes, **alone))
        return clusters
    node = cluster.nodes[0]
    part = node.changed(devices=max(1, node.devices // count), cores=max(1, node.cores // count))
    return [cluster.changed(nodes=(part,), pairs=())] * count


def sharded(request: Request, ranks: int) -> Request:
    """`request` with the optimizer's state cut among all `ranks`; pins of parameters and gradients stay."""
    shard = (request.pin.shard or ShardPin()).changed(optimizer=ranks)
    return request.changed(pin=request.pin.changed(ranks=ranks, shard=shard))


def whole(plan: Plan) -> bool:
    """Whether a replica's plan cuts the optimizer's state among all its ranks."""
    return all((len(unit.optimizer) or 1) == len(plan.ranks) for unit in plan.units)


def method_of(options: ByRounds) -> str:
    """The key in `METHODS`."""
    return str(type(options).__struct_config__.tag)


@dataclass(frozen=True)
class RoundChoice:
    """What was chosen of the rounds: steps, codec, and why."""

    steps: int
    codec: str
    flight: float
    why: tuple[str, ...]

    @property
    def lossy(self) -> bool:
        """Whether what travels is rounded."""
        return not codec(self.codec).lossless


def round_of(options: ByRounds, made: Replicas, step: float, size: float) -> RoundChoice:
    """How long a round is and what travels.

    Args:
        options: what the recipe says.
        made: the replicas.
        step: seconds of a local step of the fastest.
        size: bytes of a replica's parameters.

    Raises UserError: no round of at most `MOST` steps hides the exchange; says what link or batch would.
    """
    method = METHODS[method_of(options)]
    name = options.codec or method.codec
    hidden = (options.delay if options.delay is not None else method.delay) > 0

    def asked(name: str) -> tuple[float, int]:
        flight = float(cost.flight_seconds(size, made.count, made.link, ratio(name)))
        return flight, cost.least_steps(flight, step if hidden else WAITING * step)

    names = [name]
    if options.codec is None and options.steps is None and (options.average or method.average) == "differences":
        names += [other for other in CODECS if ratio(other) > ratio(name)]
    name = next((each for each in names if asked(each)[1] <= LONG), names[-1])
    flight, steps = asked(name)
    raw, raw_steps = asked("exact")
    local = "1 local step" if raw_steps == 1 else f"{raw_steps} local steps"
    hide = "hides" if raw_steps == 1 else "hide"
    needs = f"{local} {hide} that in full precision" if hidden else f"{local} between"
    sentences = [
        f"The exchange of all parameters takes {units.show_seconds(raw)} on this link, a local step "
        f"{units.show_seconds(step)}: {needs}"
        + (f", {steps} with the differences as {name}." if name != "exact" else "."),
        "Local steps learn less from each token than an exchange at every step, the less the longer rounds are"
        + ("." if codec(name).lossless else f", and {name} rounds what travels.")
        + " Measured: docs/measured/rounds.md, up to 1.9 % more loss than Local SGD in rounds of 3 and 4 steps.",
    ]
    if options.steps is None and steps > MOST:
        raise _never(made, step, flight, name, hidden)
    if options.steps is not None and options.steps < steps:
        waits = flight - (options.steps * step if hidden else 0.0)
        sentences.append(
            f"sync.steps = {options.steps} leaves {units.show_seconds(max(0.0, waits))} of it in view each round."
        )
    return RoundChoice(options.steps or steps, name, flight, tuple(sentences))


def _never(made: Replicas, step: float, flight: float, name: str, hidden: bool) -> UserError:
    """Says what link, batch or method would do."""
    room = MOST * step * (1.0 if hidden else WAITING)
    short = cost.MARGIN * flight / room
    other = "" if hidden or short * WAITING > 1 else 'sync.kind="eager", which computes meanwhile, '
    aim = "hides the exchange" if hidden else f"has an exchange of less than {WAITING:.0%} of its time"
    return UserError(
        f"No round of up to {MOST} steps {aim} over this link of {units.show_bits(made.link.bandwidth)}.",
        why=f"an exchange takes {units.show_seconds(flight)} as {name}, a step {units.show_seconds(step)}",
        do=f"{other}a link of {units.show_bits(short * made.link.bandwidth)}, a batch {math.ceil(short)} times as "
        "large, or sync.steps=… by hand",
    )


def ratio(name: str) -> float:
    """float32 bytes over encoded bytes, where that is fixed."""
    return compressed_collectives.ratio(codec(name))


def join(parts: Sequence[Plan], made: Replicas, chosen: RoundChoice, options: ByRounds) -> Plan:
    """One plan of the replicas' own. `parts`: of each replica, alike but for their devices and speed."""
    size = made.request.profile.global_batch
    ranks: list[Rank] = []
    replicas = []
    for index, part in enumerate(parts):
        several = len({id(cluster) for cluster in made.clusters}) > 1
        replicas.append(tuple(range(len(ranks), len(ranks) + len(part.ranks))))
        for rank in part.ranks:
            start, stop = rank.share
            share = (start + index * size, stop + index * size)
            ranks.append(rank.changed(node=index if several else rank.node, share=share))
    seconds = [part.predicted.step_seconds if part.predicted else 1.0 for part in parts]
    paces = tuple(min(seconds) / step_seconds for step_seconds in seconds)
    late, sentences = _late(options, made.request, chosen)
    outer = LocalRoundsState(
        replicas=tuple(replicas),
        method=method_of(options),
        settings=settings_of(options, chosen.codec) | late,
        steps=chosen.steps,
        adapt=options.adapt is not False,
        paces=() if all(pace > 0.95 for pace in paces) else paces,
    )
    first = parts[0]
    choices = chosen_of(outer.method, dict(outer.settings))
    refuse_pieces(choices, len(first.ranks))
    return first.with_state(outer).changed(
        planner="co2",
        ranks=tuple(ranks),
        exchanges=(*first.exchanges, Exchange(traffic="outer_step", codec=chosen.codec, agreement=outer.method)),
        rules=(
            *first.rules,
            AdaptiveRule(name="sync.steps", start=chosen.steps, low=1, high=MOST, signal="wait of a round"),
        ),
        predicted=_predicted(first, made, chosen, choices, outer.adapt),
        why=(*sentences, *chosen.why, *first.why),
        runners_up=(),
    )


def _late(options: ByRounds, request: Request, chosen: RoundChoice) -> tuple[dict[str, float | str | bool], list[str]]:
    """How many rounds of CO2 are used at once, and what the plan says of what CO2 learns."""
    if not isinstance(options, Co2):
        return {}, []
    rounds = (request.recipe.train.steps or 0) // chosen.steps
    warm = rounds // WARM if options.penalty in (None, "gap") else 0
    return {"warm": warm} if warm else {}, [LEARNS.format(rounds=units.plural(rounds, "round"), warm=warm)]


def settings_of(options: ByRounds, codec_name: str) -> dict[str, float | str | bool]:
    """What differs from the method's own choices."""
    defaults = defaults_of(method_of(options), options.penalty)
    given = {name: value for name in vars(defaults) if (value := getattr(options, name, None)) is not None}
    given["codec"] = codec_name
    return {key: value for key, value in given.items() if key == "penalty" or value != getattr(defaults, key)}


def _fragments(step: CostInputs, nodes: Sequence[int], count: int) -> Sequence[Sequence[float]]:
    """Elements that the first rank of a replica moves, fragment by fragment and tensor by tensor."""
    states, division = step.states, step.division
    if not states.sizes:
        return [[step.request.profile.trainable / len(nodes) / count]] * count
    factors = ShardFactors(int(division.params), int(division.grads), int(division.optimizer))
    return cut_sizes(owned(states.sizes, states.whole, factors, nodes, int(states.bucket_bytes)), count)


def _predicted(part: Plan, made: Replicas, chosen: RoundChoice, choices: OuterMethod, adapt: bool) -> Predicted | None:
    inside = part.predicted
    if inside is None:
        return None
    hidden = chosen.steps * inside.step_seconds if choices.delay else 0.0
    exposed = max(0.0, chosen.flight - hidden) / chosen.steps
    shards = len(part.ranks)
    on = collective_time.fleet(made.clusters[0], shards, part.ranks[0].threads)
    step = CostInputs(made.request, on, on.kinds[0], of_view(part.layout))
    nodes = [rank.node if rank.device == "cpu" else 0 for rank in part.ranks]
    fragments = _fragments(step, nodes, choices.fragments)
    given = cost.OuterRound(
        [sum(fragment) for fragment in fragments], chosen.steps, chosen.codec, made.request.bytes_each
    )
    added = cost.cost(given, made.count, made.link)
    inside = _offloaded(inside, choices, on.kinds[0], given) if step.cuda else inside
    sent = {**inside.sent_bytes, **{key: float(value) for key, value in added.sent.items()}}
    steering = cost.steering_bytes(shards, choices.fragments, choices.penalty, adapt)
    times = min(choices.fragments, chosen.steps)  # of a round in which live parameters are set
    again = {"control": steering, "parameters": times * float(refreshed(step.states, step.division))}
    sent |= {name: sent.get(name, 0.0) + size / chosen.steps for name, size in again.items() if size}
    seconds = inside.step_seconds + exposed
    bills = [collective_time.power_and_price(cluster, shards) for cluster in made.clusters]
    watts, prices = ([bill[index] for bill in bills] for index in (0, 1))
    speed = made.count * inside.step_seconds / seconds
    return inside.changed(
        step_seconds=seconds,
        tokens_per_second=inside.tokens_per_second * speed,
        tokens_per_second_per_device=inside.tokens_per_second_per_device * speed / made.count,
        mfu=inside.mfu * speed / made.count,
        terms={**inside.terms, "outer": exposed},
        sent_bytes=sent,
        watts=sum(watts) if all(watts) else 0.0,
        price_per_hour=sum(prices) if all(prices) else 0.0,
        sources={**inside.sources, **added.sources},
    )


def _offloaded(inside: Predicted, choices: OuterMethod, kind: DeviceGroup, given: cost.OuterRound) -> Predicted:
    """With what the outer engine keeps in host memory, and its crossings: live tensors out and in, and a replica's own
    progress in. Raises UserError: there is no room for it."""
    if not choices.offload:
        return inside
    size, tier = given.width * sum(given.fragments), offload.rate(kind, "host")
    size_kept = cost.copies(choices) * size
    if size_kept > tier.room:
        raise UserError(
            f"Rounds keep {units.show_size(size_kept)} of each rank in host memory, and {units.show_size(tier.room)} "
            "are there for it.",
            do="sync.kind=every_step, or machines with more memory",
        )
    seconds = float((size / tier.read + (1 + choices.eager) * size / tier.write) / given.steps)
    terms = {"offload": inside.terms.get("offload", 0.0) + seconds}
    away = {**inside.waiting_bytes, "outer": float(size_kept)}
    return inside.taking(inside.step_seconds + seconds, **terms).changed(waiting_bytes=away)


@dataclass(frozen=True)
class Worth:
    """Whether rounds pay: the one rule of what is chosen and of what is said about it.

    Attributes:
        alone: seconds of the slowest replica's own step.
        times: rounds pay where the fastest plan that agrees at every step takes so many times as long.
    """

    alone: float
    times: float

    def pays(self, whole: float) -> bool:
        """Where a step with every exchange takes `whole` seconds."""
        return whole >= self.times * self.alone

    def guess(self, request: Request, made: Replicas) -> float:
        """The bandwidth (bytes/s) at which a sum of gradients that nothing hides makes a step `times` as long."""
        size = (request.low or request.bytes_each) * request.profile.trainable
        sent = made.link.bandwidth * float(cost.flight_seconds(size, made.count, made.link))
        return sent / (self.times - 1) / self.alone

    def sentence(self, whole: float, link: Link, rounds: Plan, limits: tuple[float, float]) -> str:
        """What is chosen and why. `limits`: bytes/s up to which rounds pay, 0 where they never do, and from which on
        they do not."""
        steps, taken = rounds.state(LocalRoundsState).steps, units.show_seconds(rounds.step_seconds)
        chosen = (
            "replicas agree by rounds, which pay"
            if self.pays(whole)
            else f"it stays; rounds of {units.plural(steps, 'local step')} would take {taken}, and pay"
        )
        return (
            f"Over the link of {units.show_bits(link.bandwidth)} the fastest plan that agrees at every step takes "
            f"{units.show_seconds(whole)} a step, {whole / self.alone:.2f} times as long as a replica by itself "
            f"({units.show_seconds(self.alone)}): {chosen} from {self.times:g} times on, here "
            + (
                "up to {} and not from {} on.".format(*map(units.show_bits, limits))
                if limits[0]
                else "at no bandwidth."
            )
        )


def worth(parts: Sequence[Plan]) -> Worth:
    """Of replicas that are each planned by themselves."""
    return Worth(max(part.step_seconds for part in parts), min(SLOW, ALONE * len(parts)))
