"""Choices: what a plan may do besides laying a model over ranks. A new one is a folder of `mechanisms` and one row.

A row is imported only where it may have an answer: a model that needs no other system loads none. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from espalier.plan.axes.offload import NODE
from espalier.plan.collective_time import gpus
from espalier.recipe import Auto, GraphTransformer

if TYPE_CHECKING:
    from espalier.machine.cluster import Cluster
    from espalier.plan.ask import Ask, PlanDecision
    from espalier.plan.base import ChoiceState, Plan
    from espalier.plan.measured_cluster import Speeds
    from espalier.plan.request import Request
    from espalier.plan.search import Option


class Waits(NamedTuple):
    """What a mechanism makes a step wait for.

    Attributes:
        terms: of `Predicted.terms`, in words; groups: of ranks that exchange.
    """

    what: str
    terms: Mapping[str, str]
    groups: Sequence[Sequence[int]]


class Replanner(Protocol):
    """Plans a run anew on its own places, at the speeds that they showed."""

    def seconds(self, request: Request, cluster: Cluster, plan: Plan, speeds: Speeds) -> float:
        """Of a step of `plan` as it is, by the cost model at the `speeds`."""

    def planned_work(self, request: Request, cluster: Cluster, plan: Plan) -> tuple[float, ...]:
        """Seconds that each rank computes in a step, as planned."""

    def plan_on(self, request: Request, cluster: Cluster, plan: Plan, remaining: Sequence[int], speeds: Speeds) -> Plan:
        """The fastest plan for the ranks `remaining` of `plan`, at the `speeds` of all its ranks.

        Raises UserError where they cannot hold the run.
        """

    def describe(self, plan: Plan) -> str:
        """What its ranks hold, in a few words."""


class PlanChoice(Protocol):
    """What one system adds to plans. Each method has the plain answer of a system that adds nothing."""

    def priced(self, ask: Ask) -> tuple[Request, Sequence[str]]:
        """The request with what layouts are to be priced with, and why, in sentences."""
        return ask.request, ()

    def divided(self, request: Request) -> str:
        """What ranks divide among them instead of samples, in words; empty: nothing."""
        return ""

    def alone(self, ask: Ask) -> PlanDecision | None:
        """The decision, where it is made otherwise than by a search for this very request."""
        return None

    def candidates(self, ask: Ask, best: PlanDecision) -> Iterable[PlanDecision]:
        """Other whole plans, each of them better than the one before and than `best`."""
        return ()

    def placed(self, plan: Plan, request: Request, option: Option) -> Plan:
        """The plan of an option of the search, with ranks that serve those that train."""
        return plan

    def finish(self, best: PlanDecision, ask: Ask) -> Plan:
        """The plan of `best` with what the system adds to any plan."""
        return best.plan

    def words(self, best: PlanDecision, ask: Ask) -> Iterable[str]:
        """What a finished plan says last."""
        return ()

    def cures(self, request: Request, cluster: Cluster) -> Iterable[str]:
        """What to write instead, where nothing fits."""
        return ()

    # --- of a plan that holds it -------------------------------------------------------------------------------

    def part(self, plan: Plan) -> str:
        """What it makes of the plan, in the first sentence; empty: nothing."""
        return ""

    def waits(self, plan: Plan) -> Iterable[Waits]:
        """What it makes a step wait for."""
        return ()

    def away(self, plan: Plan, kinds: str, slower: str) -> Iterable[str]:
        """Where the states of `kinds` wait, if it holds them, in sentences."""
        return ()

    @property
    def replanner(self) -> Replanner | None:
        """Who plans anew what it has planned; None: `plan.replan` does."""
        return None


@dataclass(frozen=True)
class ChoiceRow:
    """A choice that is loaded when it is asked.

    Attributes:
        module: with a `CHOICE`; what it says in plans, if anything, is `STATE` of `state.py` beside it.
        when: whether it may add something, of a request on a cluster.
        holds: whether it has added something to a plan that has no state of it, of a request where that is known.
    """

    module: str
    when: Callable[[Request, Cluster], Any]
    holds: Callable[[Plan, Request | None], Any] = lambda plan, request: False

    @property
    def state(self) -> type[ChoiceState]:
        """What it says in plans."""
        module = f"{self.module.rpartition('.')[0]}.state"
        declared: type[ChoiceState] = import_module(module).STATE
        return declared

    @property
    def choice(self) -> PlanChoice:
        """What the row stands for."""
        loaded: PlanChoice = import_module(self.module).CHOICE
        return loaded


TABLE: dict[str, ChoiceRow] = {
    "task_waves": ChoiceRow(
        "espalier.mechanisms.task_waves.choice",
        lambda request, cluster: "task_waves" in request.profile.facts,
        lambda plan, request: request is not None and "task_waves" in request.profile.facts,
    ),
    "precision": ChoiceRow(
        "espalier.plan.precision_choice",
        lambda request, cluster: request.precision == "auto" or gpus(cluster),
    ),
    "codecs": ChoiceRow(
        "espalier.mechanisms.codecs.choice",
        lambda request, cluster: (
            request.recipe.comm.codec != "exact"
            and (request.recipe.comm.codec != "auto" or (cluster.machines > 1 and not gpus(cluster)))
        ),
    ),
    "expert_parallel": ChoiceRow(
        "espalier.mechanisms.expert_parallel.choice",
        lambda request, cluster: request.expert_ranks > 1,
    ),
    "token_chunks": ChoiceRow(
        "espalier.mechanisms.token_chunks.choice",
        lambda request, cluster: "token_chunks" in request.profile.facts,
    ),
    "optimizer_node": ChoiceRow(
        "espalier.mechanisms.optimizer_node.choice",
        lambda request, cluster: request.offload == NODE,
        lambda plan, request: plan.offload == NODE,
    ),
    "unequal_pipelines": ChoiceRow(
        "espalier.mechanisms.unequal_pipelines.choice",
        lambda request, cluster: (
            not request.recipe.sync.by_rounds
            and (request.pin.pipelines or any(table.device != cluster.nodes[0].device for table in cluster.nodes))
        ),
        lambda plan, request: plan.planner == "flashflex",
    ),
    "local_rounds": ChoiceRow(
        "espalier.mechanisms.local_rounds.choice",
        lambda request, cluster: (
            request.recipe.sync.by_rounds or (isinstance(request.recipe.sync, Auto) and cluster.machines > 1)
        ),
    ),
    "disk_batches": ChoiceRow(
        "espalier.mechanisms.disk_batches.choice",
        lambda request, cluster: "disk_batches" in request.profile.facts,
    ),
    "halo_exchange": ChoiceRow(
        "espalier.mechanisms.halo_exchange.choice",
        lambda request, cluster: "halo_exchange" in request.profile.facts,
    ),
    "pattern_attention": ChoiceRow(
        "espalier.mechanisms.pattern_attention.choice",
        lambda request, cluster: isinstance(request.recipe.model, GraphTransformer),
    ),
}
"""By name, in the order in which they are asked."""


def asked(request: Request, cluster: Cluster) -> list[PlanChoice]:
    """Those that may add something to plans of `request`."""
    return [row.choice for row in TABLE.values() if row.when(request, cluster)]


def of(plan: Plan, request: Request | None = None) -> Iterator[PlanChoice]:
    """Those that have added something to `plan`, of `request` where that is known."""
    return (row.choice for name, row in TABLE.items() if name in plan.choices or row.holds(plan, request))


def priced(ask: Ask) -> tuple[Request, tuple[str, ...]]:
    """The request with what layouts are to be priced with, and why, in sentences."""
    sentences: list[str] = []
    for choice in asked(ask.request, ask.cluster):
        request, why = choice.priced(ask)
        ask = replace(ask, request=request)
        sentences += why
    return ask.request, tuple(sentences)
