"""Optimizer nodes in plans: the ranks that hold the model for those that train, and what a plan says of them.

What they cost is priced with every layout (`plan.axes.optimizer_node`). No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from espalier.mechanisms.optimizer_node.state import OptimizerNodeState
from espalier.plan import collective_time
from espalier.plan.axes import optimizer_node
from espalier.plan.base import Plan
from espalier.plan.choice import PlanChoice
from espalier.plan.request import Request
from espalier.plan.search import Option
from espalier.recipe import units


class OptimizerNodeChoice(PlanChoice):
    """Processes that hold parameters and optimizer states for all trainers."""

    def placed(self, plan: Plan, request: Request, option: Option) -> Plan:
        """The plan with the processes that hold the model."""
        terms = plan.predicted.terms if plan.predicted is not None else {}
        on = collective_time.fleet(option.cluster, int(option.layout.world), option.layout.threads)
        summed = optimizer_node.summed(request, on, terms)
        workers = Counter(rank.node for rank in plan.ranks)
        sites = [node for node, count in workers.items() if count > 1] if summed else []
        link = float(optimizer_node.rates(on, on.kinds[0], summed).link)
        serving = optimizer_node.ranks(request, option.cluster, option.nodes, sites)
        state = OptimizerNodeState(
            layer_window=optimizer_node.WINDOW,
            node_link=link if math.isfinite(link) else 0.0,
        )
        return plan.with_state(state).changed(ranks=(*plan.ranks, *serving))

    def away(self, plan: Plan, kinds: str, slower: str) -> Iterator[str]:
        """Nodes, how many layers a rank has at a time, and the other processes that serve."""
        nodes = [rank.node for rank in plan.optimizer_nodes]
        hold = "holds" if len(nodes) == 1 else "hold"
        yield (f"{units.plural(len(nodes), 'optimizer node')} on {_machines(nodes)} {hold} {kinds} on disk; {slower}.")
        window = plan.state(OptimizerNodeState).layer_window
        yield f"A rank pulls {window} layers at a time and pushes their gradients."
        yield from _aggregators(plan)
        yield from _standbys(plan)


def _aggregators(plan: Plan) -> Iterable[str]:
    """Why there are some, and the bytes that they send over a link in a step."""
    sites = [rank.node for rank in plan.ranks if rank.role == "aggregator"]
    if not sites or plan.predicted is None:
        return
    pushed = plan.predicted.sent_bytes.get("gradients", 0.0)
    workers = Counter(rank.node for rank in plan.trainer_ranks)
    count, where = max(workers[node] for node in sites), ", ".join(map(str, sites))
    many = "s" * (len(sites) > 1)
    yield (
        f"An aggregator on machine{many} {where} adds up what {count} workers push and pulls once for all: "
        f"{units.show_size(pushed)} of gradients leave a machine in a step, not "
        f"{units.show_size(count * pushed)}."
    )


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


CHOICE = OptimizerNodeChoice()
