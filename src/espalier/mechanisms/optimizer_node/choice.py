"""Optimizer nodes in plans: the ranks that hold the model for those that train, and what a plan says of them.

What they cost is priced with every layout (`plan.axes.optimizer_node`). No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from espalier.mechanisms.optimizer_node.state import OptimizerNodeState
from espalier.plan import collective_time
from espalier.plan.axes import optimizer_node
from espalier.plan.axes.node_cost import Route
from espalier.plan.base import RESIDENT, Plan
from espalier.plan.choice import PlanChoice
from espalier.plan.layout_estimate import grid
from espalier.plan.request import Request
from espalier.plan.search import Option
from espalier.recipe import units


class OptimizerNodeChoice(PlanChoice):
    """Processes that hold parameters and optimizer states for all trainers."""

    def placed(self, plan: Plan, request: Request, option: Option) -> Plan:
        """The plan with the processes that hold the model."""
        terms = plan.predicted.terms if plan.predicted is not None else {}
        on = collective_time.fleet(option.cluster, int(option.layout.world), option.layout.threads)
        computing = sum(terms.get(name, 0.0) for name in ("forward", "backward", "recompute"))
        route = optimizer_node.chosen(request, on, computing)
        step = optimizer_node.step_bytes(request)
        link = float(optimizer_node.rates(on, on.kinds[0], route, step).link)
        workers = Counter(rank.node for rank in plan.ranks)
        machines = option.cluster.machines
        numbers = option.nodes or range(machines + sum(table.count for table in option.cluster.helpers))
        nodes = {
            "machine": [node for node, count in workers.items() if count > 1],
            "host": numbers[-sum(table.count for table in on.aggregators) :][: route.aggregators],
            "node": numbers[machines : machines + 1],
        }
        serving = optimizer_node.ranks(request, option.cluster, option.nodes, nodes.get(route.place, ()))
        state = OptimizerNodeState(
            layer_window=optimizer_node.WINDOW,
            node_link=link if math.isfinite(link) else 0.0,
        )
        why = (*plan.why, *_links(request, route), *_sharded(plan, request, option))
        return plan.with_state(state).changed(ranks=(*plan.ranks, *serving), why=why)

    def away(self, plan: Plan, kinds: str, slower: str) -> Iterator[str]:
        """Nodes, how many layers a rank has at a time, and the other processes that serve."""
        nodes = [rank.node for rank in plan.optimizer_nodes]
        hold = "holds" if len(nodes) == 1 else "hold"
        yield (f"{units.plural(len(nodes), 'optimizer node')} on {_machines(nodes)} {hold} {kinds} on disk; {slower}.")
        window = plan.state(OptimizerNodeState).layer_window
        yield f"A rank pulls {window} layers at a time and pushes their gradients."
        yield from _standbys(plan)


def _links(request: Request, route: Route) -> Iterable[str]:
    """Aggregators, and what crosses each link in a step."""
    if route.place:
        count = units.plural(route.aggregators, "aggregator")
        yield f"{count} {_PLACES[route.place]}: what workers push is added up there, and pulled once for all of them."
    elif request.pin.roles and "aggregator" in request.pin.roles:
        yield "No aggregator, which was asked for: machines have one worker, and the cluster file names no host for it."
    loads = route.links(*optimizer_node.step_bytes(request)).items()
    sizes = (f"{name} {' and '.join(map(units.show_size, load))}" for name, load in loads)
    yield f"Links carry in a step, of parameters and of gradients: {', '.join(sizes)}."


def _sharded(plan: Plan, request: Request, option: Option) -> Iterable[str]:
    """How much faster or slower ZeRO-1 is on the same ranks with the same codec."""
    layout = option.layout
    if plan.predicted is None or layout.dp == 1:
        return
    zero1 = replace(layout, optimizer=layout.dp, recompute="none")
    costs = grid(request.changed(offload=RESIDENT), option.on, zero1)
    seconds = float(costs.seconds)
    ratio = plan.predicted.step_seconds / seconds
    fits = "but lacks memory" if costs.over > 0 else 'and fits (plan.pin.offload = "none")'
    yield f"ZeRO-1 on these ranks takes {units.show_seconds(seconds)} a step, is {ratio:.2f} times as fast, {fits}."


def _standbys(plan: Plan) -> Iterable[str]:
    """What each is sent in a step."""
    standbys = [rank.node for rank in plan.ranks if rank.role == "standby"]
    if not standbys or plan.predicted is None:
        return
    sums = plan.predicted.state_bytes["params"] / len(plan.optimizer_nodes)
    yield (
        f"{units.plural(len(standbys), 'standby')} on {_machines(standbys)}: each is sent the sums of its node, "
        f"{units.show_size(sums)} in a step, takes the same steps, and serves where the node is lost."
    )


def _machines(numbers: Iterable[int]) -> str:
    every = sorted(set(numbers))
    return f"machine{'s' * (len(every) > 1)} {', '.join(map(str, every))}"


_PLACES = {"machine": "beside the workers", "host": "on other machines", "node": "beside the optimizer node"}
CHOICE = OptimizerNodeChoice()
