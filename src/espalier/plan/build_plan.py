"""Builds a plan from the search's best option: ranks, units and stages. No torch."""

from __future__ import annotations

from espalier.plan import choice, collective_time, explain
from espalier.plan.axes.offload import NODE
from espalier.plan.base import Plan, Predicted, Rank, Stage, Unit
from espalier.plan.calibration import DATASHEET, Calibration, own_stack
from espalier.plan.collective_time import seats
from espalier.plan.layout_estimate import Shares, estimate
from espalier.plan.layouts import stage_layers
from espalier.plan.request import Request, classes, exchanges
from espalier.plan.search import Option, SearchResult


def make(request: Request, result: SearchResult, option: Option, calibration: Calibration = DATASHEET) -> Plan:
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
                whole=request.muon and layout.optimizer > 1,
            ),
        ),
        stages=_stages(request, option),
        exchanges=exchanges(request.crossings, classes(layout.shards, layout.tp, layout.hp, layout.cp, layout.pp)),
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
        compile=request.recipe.train.compile,
        predicted=predicted,
        why=tuple(explain.why(request, result, option)),
        runners_up=tuple(explain.runners_up(request, result, option)),
    )
    for each in choice.asked(request, option.cluster):
        plan = each.placed(plan, request, option)
    if calibration.stacks and (doubt := calibration.doubt(own_stack(option.cluster))):
        return plan.changed(why=(*plan.why, doubt))
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


def _samples(request: Request, option: Option) -> list[int]:
    """Samples of each replica, in order; they add up to the batch."""
    layout = option.layout
    batch = request.profile.global_batch
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
    layout = option.layout
    at = 0
    cuts = []
    for samples in _samples(request, option):
        cuts.append((at, at + samples))
        at += samples
    replica = layout.tp * layout.sp
    places = seats(option.cluster, int(layout.world))
    return tuple(
        Rank(
            device=place.device_name,
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
        for index, layers in enumerate(stage_layers(request.profile.layers, layout.pp * layout.chunks))
    )
