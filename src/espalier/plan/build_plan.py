"""Builds a plan from the search's best option: ranks, units and stages. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.machine.cluster import Place
from espalier.plan import choice, collective_time, device_model, explain
from espalier.plan.axes.experts import placed
from espalier.plan.axes.offload import NODE
from espalier.plan.base import Exchange, Plan, Predicted, Rank, Stage, Unit
from espalier.plan.calibration import DATASHEET, Calibration, own_stack
from espalier.plan.collective_time import seats
from espalier.plan.layout_estimate import Shares, estimate
from espalier.plan.layouts import stage_layers
from espalier.plan.request import Request, exchanges
from espalier.plan.search import Found, Option


def make(request: Request, found: Found, option: Option, calibration: Calibration = DATASHEET) -> Plan:
    """The plan of an option, with reasons and what the others lose."""
    predicted = predict(request, option, calibration)
    layout = option.layout
    # Of the first ranks; other groups are alike, `tp` apart. Muon's matrices stay whole.
    sizes = {"params": layout.params, "grads": layout.grads, "optimizer": layout.optimizer}
    groups = {name: tuple(range(0, size * layout.tp, layout.tp)) if size > 1 else () for name, size in sizes.items()}
    plan = Plan(
        planner="search",
        ranks=_ranks(request, option),
        units=(
            Unit(
                params=groups["params"],
                grads=groups["grads"],
                optimizer=groups["optimizer"],
                whole=request.optimizer == "muon" and layout.optimizer > 1,
            ),
        ),
        stages=_stages(request, option),
        experts=(held := _experts(request, option)),
        exchanges=(
            *(exchanges(request.crossings) if layout.shards > 1 else ()),
            *(
                Exchange(traffic="experts", codec=request.expert_rows)
                for _ in held[:1]
                if request.expert_rows != "exact"
            ),
        ),
        algorithm=layout.algorithm,
        placement=layout.placement,
        offload=request.offload,
        schedule=layout.schedule,
        interleave=layout.chunks,
        prefetch=explain.prefetch(request, option),
        bucket=explain.bucket(request, option),
        micro_batch=int(min(layout.micro_batch, max(_samples(request, option)))),
        recompute="none" if request.offload.parameters != "device" else layout.recompute,
        precision=request.precision,
        compile=request.compile,
        predicted=predicted,
        why=(
            *explain.why(request, found, option),
            *_spread(request, held),
            *filter(None, [calibration.doubt(own_stack(option.cluster))]),
        ),
        runners_up=tuple(explain.runners_up(request, found, option)),
    )
    for each in choice.asked(request, option.cluster):
        plan = each.placed(plan, request, option)
    return plan


def predict(request: Request, option: Option, calibration: Calibration) -> Predicted:
    """What the option should cost, in full."""
    shares = Shares(option.shares, option.speeds)
    predicted = estimate(request, option.cluster, option.layout, calibration.factors, shares)
    ranks = int(option.layout.world)
    known = calibration.on(option.cluster, ranks, own_stack(option.cluster))
    watts, price = collective_time.power_and_price(option.cluster, ranks, request.offload == NODE)
    return predicted.changed(
        spread=known.spread,
        watts=watts,
        price_per_hour=price,
        sources={**predicted.sources, "coefficients": calibration.source},
    )


def _experts(request: Request, option: Option) -> tuple[tuple[int, ...], ...]:
    """Who holds which experts: more on faster ranks with faster links, as memory allows. Empty: every rank all of
    them."""
    ep = request.expert_ranks
    if ep == 1:
        return ()
    places = seats(option.cluster, int(option.layout.world))
    each = request.expert_parameters / request.experts
    work, crossing = 6 * each, 4.0 * request.width * request.compute  # of a row: operations, and bytes each way

    def rate(place: Place) -> float:
        table = place.table
        used = option.layout.threads / max(1, table.cores) if table.device.kind == "cpu" else 1.0
        flops = device_model.sustained(table.device, request.precision) * used
        link = table.between or option.cluster.between
        return 1 / max(work / max(flops, 1.0), crossing / link.bandwidth if link is not None else 0.0)

    rates = [min(map(rate, places[first::ep])) for first in range(ep)]
    stored = 4 * request.bytes_each * each * max(1, request.layers // option.layout.pp)
    most = -(-request.experts // ep) + max(0, int(-option.over / stored))
    return placed(rates, [1.0] * request.experts, [most] * ep)


def _spread(request: Request, held: Sequence[Sequence[int]]) -> list[str]:
    """Why experts lie where they lie."""
    if not held:
        return []
    sizes = [len(experts) for experts in held]
    told = " and ".join(map(str, dict.fromkeys(sizes)))
    pinned = f", as pinned: plan.pin.ep = {len(held)}" if request.pin.ep else ""
    unlike = max(sizes) - min(sizes) > 1
    return [
        f"Experts are spread over groups of {len(held)} ranks ({told} each{pinned}). Messages are priced for even "
        f"routing.{' Ranks that compute or send faster hold more.' if unlike else ''}"
    ]


def _samples(request: Request, option: Option) -> list[int]:
    """Samples of each replica, in order; they add up to the batch."""
    layout, batch = option.layout, request.global_batch
    if option.shares is None:
        each, over = divmod(batch, layout.dp)
        return [each + (index < over) for index in range(layout.dp)]
    kinds = collective_time.kinds(seats(option.cluster, int(layout.world)))
    share = dict(zip(dict.fromkeys(kinds), option.shares, strict=True))
    most = [share[kind] for kind in kinds]
    spare = sum(most) - batch  # shares are rounded up; the last ranks (the slowest) give back one each, then again
    index = len(most) - 1
    while spare > 0:
        if most[index] > 1:
            most[index] -= 1
            spare -= 1
        index = index - 1 if index else len(most) - 1
    return most


def _ranks(request: Request, option: Option) -> tuple[Rank, ...]:
    layout, at, cuts = option.layout, 0, []
    for samples in _samples(request, option):
        cuts.append((at, at + samples))
        at += samples
    replica = layout.tp * layout.sp
    places = seats(option.cluster, int(layout.world))
    return tuple(
        Rank(
            device="cpu" if place.table.device.kind == "cpu" else f"cuda:{place.slot}",
            node=option.nodes[place.node] if option.nodes else place.node,
            threads=layout.threads,
            share=cuts[index // replica % layout.dp],
        )
        for index, place in enumerate(places)
    )


def _stages(request: Request, option: Option) -> tuple[Stage, ...]:
    layout = option.layout
    each = layout.dp * layout.tp * layout.sp
    most = max(_samples(request, option))
    kinds = collective_time.kinds(seats(option.cluster, int(layout.world)))
    speed = dict(zip(dict.fromkeys(kinds), option.speeds or (), strict=False))
    return tuple(
        Stage(
            ranks=tuple(range(index % layout.pp * each, (index % layout.pp + 1) * each)),
            layers=layers,
            micro_batches=-(-most // min(layout.micro_batch, most)),
            tensor=layout.tp,
            heads=layout.hp,
            context=layout.cp,
            window=layout.window,
            speeds=tuple(speed[kind] for kind in kinds) if speed else (),
        )
        for index, layers in enumerate(stage_layers(request.layers, layout.pp * layout.chunks))
    )
