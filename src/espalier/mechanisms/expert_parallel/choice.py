"""Experts over ranks in plans: which rank of a group holds which, and why.

Over how many ranks they are spread is searched with the layouts (`plan.layout_decision`). No torch.
"""

from __future__ import annotations

from espalier.machine.cluster import Place
from espalier.mechanisms.expert_parallel.state import ExpertParallelState
from espalier.plan import device_model
from espalier.plan.axes.experts import placed
from espalier.plan.base import Exchange, Plan
from espalier.plan.choice import PlanChoice
from espalier.plan.collective_time import seats
from espalier.plan.request import Request
from espalier.plan.search import Option


class ExpertParallelChoice(PlanChoice):
    """Experts that the ranks of a group divide among them."""

    def placed(self, plan: Plan, request: Request, option: Option) -> Plan:
        """The plan with its map of experts, and how their rows travel."""
        state = ExpertParallelState(experts=_experts(request, option))
        rows = (Exchange(traffic="experts", codec=request.recipe.comm.experts),) * (
            request.recipe.comm.experts != "exact"
        )
        return plan.with_state(state).changed(
            exchanges=(*plan.exchanges, *rows),
            why=(*plan.why, _spread(request, state)),
        )


def _experts(request: Request, option: Option) -> tuple[tuple[int, ...], ...]:
    """Who holds which experts: more on faster ranks with faster links, as memory allows."""
    ep = request.expert_ranks
    places = seats(option.cluster, int(option.layout.world))
    each = request.experts.parameters / request.experts.total
    work, crossing = 6 * each, 4.0 * request.profile.width * request.compute  # of a row: operations, and bytes each way

    def rate(place: Place) -> float:
        table = place.table
        used = option.layout.threads / max(1, table.cores) if table.device.kind == "cpu" else 1.0
        flops = device_model.sustained(table.device, request.precision) * used
        link = table.between or option.cluster.between
        return 1 / max(work / max(flops, 1.0), crossing / link.bandwidth if link is not None else 0.0)

    rates = [min(map(rate, places[first::ep])) for first in range(ep)]
    stored = 4 * request.bytes_each * each * max(1, request.profile.layers // option.layout.pp)
    most = -(-request.experts.total // ep) + max(0, int(-option.over / stored))
    return placed(rates, [1.0] * request.experts.total, [most] * ep)


def _spread(request: Request, state: ExpertParallelState) -> str:
    """Why experts lie where they lie."""
    sizes = [len(experts) for experts in state.experts]
    counts = " and ".join(map(str, dict.fromkeys(sizes)))
    pinned = f", as pinned: plan.pin.ep = {len(sizes)}" if request.pin.ep else ""
    unlike = max(sizes) - min(sizes) > 1
    return (
        f"Experts are spread over groups of {len(sizes)} ranks ({counts} each{pinned}). Messages are priced for even "
        f"routing.{' Ranks that compute or send faster hold more.' if unlike else ''}"
    )


CHOICE = ExpertParallelChoice()
