"""Expert parallelism as a mechanism: each rank keeps the experts that the plan gives it, and tokens go to them.

Experts lie on consecutive ranks of those that hold the same parameters otherwise (DeepSpeed-MoE, arXiv 2201.05596):
these sum all other gradients together, and the gradients of an expert only with the ranks that hold it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.checkpoint.all_names import AllNames
from espalier.comm.base import Traffic, traffic
from espalier.mechanisms.expert_parallel.flashmoe import FlashMoE
from espalier.mechanisms.expert_parallel.flashmoe.shared_memory import links
from espalier.mechanisms.expert_parallel.state import ExpertParallelState
from espalier.parallel.expert_map import ExpertMap
from espalier.parallel.model_cut import ModelCut
from espalier.plan.compose import Claim
from espalier.recipe.errors import UserError
from espalier.train.mechanism import Build, Mechanism
from espalier.train.seams import Filled, Seam, expert_numbers, fields_of

if TYPE_CHECKING:
    from espalier.checkpoint.base import StatefulParts
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

CLAIM = Claim(
    "expert_parallel",
    question="route",
    needs={"a model"},
    changes={"tokens reach their experts"},
    forbids={"compiles blocks"},
    after={"model stages"},
)


class ExpertParallel(Filled):
    """A rank keeps its own experts, and tokens go to the ranks that hold theirs."""

    claim = CLAIM
    record = "flashmoe"
    seam: Seam = "route"

    def __init__(self, expert_map: ExpertMap, codec: str = "exact") -> None:
        self.expert_map = expert_map
        self.codec = codec

    def wrap(self, context: Build) -> None:
        """Frees the others' experts; the model was built whole, so initial weights are the same whatever the map.
        Raises UserError where the plan's map is not of this model."""
        model = context.model
        mesh = context.mesh
        assert model is not None
        assert mesh.replica is not None, "an expert group has several ranks"
        cut = context.cut = context.cut or ModelCut(mesh.replica)
        everyone = mesh.mesh.same_parameters(mesh.rank)
        same = mesh.mesh.same_experts(mesh.rank)
        ranks = mesh.mesh.expert_group(mesh.rank)
        local_experts = self.expert_map.ranks[ranks.index(mesh.rank)]
        group = mesh.of(ranks)
        assert group is not None
        self.links = links(group)
        self.group = group
        places = fields_of(model, self.seam)
        for module, _ in places:
            keep(module, local_experts, self.expert_map.count)
        own_names = expert_numbers(model)
        cut.peers = {name: same if name in own_names else everyone for name, _ in model.named_parameters()}
        cut.in_step = True
        super().wrap(context)
        routes: list[ExpertGroup] = [getattr(module, field) for module, field in places]
        cut.idle = [(module, route.idle) for (module, _), route in zip(places, routes, strict=True)]
        meter = LoadMeter(routes, local_experts, self.expert_map.count, mesh.replica)
        context.meters |= {"experts": meter.load, "dispatch": meter.waited}

    def replacement(self, context: Build, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Dispatch among the ranks of this one's expert group."""
        experts = list(module.get_submodule("experts").children())
        parameter = next(module.parameters())
        nothing = torch.empty(0, parameter.shape[-1], dtype=parameter.dtype, device=context.device)
        return ExpertGroup(FlashMoE(self.group, self.expert_map, self.links, self.codec), nothing, experts)

    def state(self, context: Build, parts: StatefulParts) -> StatefulParts:
        """Under the names of all experts."""
        return {name: AllNames(part, context.mesh.replica) for name, part in parts.items()}


class LoadMeter:
    """What the experts of a replica's ranks did since the last step. Has state: what was counted before.

    Args:
        routes: of this rank's layers; own: its experts in each, of `count`; group: all ranks of the replica, which ask
            together.
    """

    def __init__(
        self, routes: Sequence[ExpertGroup], local_experts: Sequence[int], count: int, group: dist.ProcessGroup
    ) -> None:
        self._routes = [route.route for route in routes]
        self._own = local_experts
        self._group = group
        self._before = torch.zeros(count + 1, dtype=torch.float64)
        self._found = torch.zeros(0)

    def load(self) -> dict[str, float]:
        """Rows that each expert got, in all layers."""
        now = torch.zeros_like(self._before)
        for route in self._routes:
            now[list(self._own)] += torch.tensor(route.load, dtype=torch.float64)
        now[-1] = sum(links.idle for links in {id(route.links): route.links for route in self._routes}.values())
        waited = torch.zeros(self._group.size(), dtype=torch.float64)
        waited[self._group.rank()] = now[-1] - self._before[-1]
        self._found = torch.cat([now[:-1] - self._before[:-1], waited])
        self._before = now
        with traffic(Traffic.CONTROL):
            dist.all_reduce(self._found, group=self._group)
        return {str(expert): float(rows) for expert, rows in enumerate(self._found[: len(now) - 1])}

    def waited(self) -> dict[str, float]:
        """Seconds in which a rank had nothing to do in its layers of experts: on average, and the one that had most."""
        seconds = self._found[-self._group.size() :]
        return {"waited": float(seconds.mean()), "longest": float(seconds.max())}


class ExpertGroup:
    """A route that a rank can also take part in without tokens of its own. Has state: what the last rows looked like.

    Args:
        route: the exchange; nothing: no rows, [0, width]; experts: those of this rank.
    """

    def __init__(self, route: FlashMoE, nothing: Tensor, experts: list[nn.Module]) -> None:
        self.route = route
        self.experts = experts
        self._rows = nothing

    def __call__(self, x: Any, chosen: Any, weights: Any, experts: list[nn.Module]) -> Any:
        self._rows = x.detach()[:0]
        return self.route(x, chosen, weights, experts)

    def idle(self) -> None:
        """One dispatch of other ranks' tokens. Validation only."""
        nothing = self._rows.new_empty(0, 1)
        self.route(self._rows, nothing.long(), nothing, self.experts)


def keep(module: nn.Module, local_experts: tuple[int, ...], count: int) -> None:
    """Leaves the `local_experts` in `module.experts`, by name. Raises UserError where there are not `count`."""
    experts = dict(module.get_submodule("experts").named_children())
    if len(experts) != count:
        raise UserError(
            f"The plan's map has {count} experts, and a layer of the model has {len(experts)}.",
            do="delete plan.json; it is then planned again",
        )
    module.experts = nn.ModuleDict({str(number): experts[str(number)] for number in local_experts})


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the plan spreads the experts."""
    codec = next((exchange.codec for exchange in plan.exchanges if exchange.traffic == Traffic.EXPERTS), "exact")
    experts = plan.state(ExpertParallelState).experts
    return ExpertParallel(ExpertMap(experts), codec) if len(experts) > 1 else None
