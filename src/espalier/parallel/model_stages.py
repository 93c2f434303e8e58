"""The stages of a model that one rank holds: its modules stay under their names, all others are freed.

A parameter that several stages use (tied embeddings) belongs to the first of them; ranks of the others borrow a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from espalier.parallel.action_list import Pipeline
from espalier.parallel.mesh import Ranks
from espalier.parallel.model_cut import ModelCut, Recut
from espalier.parallel.workload import Pieces, Shard
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from espalier.parallel.model_cut import ShardedStream
    from espalier.plan.base import Plan


class Placed(NamedTuple):
    """One pipeline of a plan, and the layers `[first, last)` of each of its stages."""

    pipeline: Pipeline
    layers: tuple[tuple[int, int], ...]


def pipelines(plan: Plan, tasks: int = 1) -> list[Placed]:
    """What the plan's stages say: a pipeline for each part of the samples, in the order of the plan. Raises UserError
    where a boundary would cut sequences anew."""
    placed = []
    for number, stages in plan.pipelines.items():
        widths = [stage.tensor * stage.sequence for stage in stages]
        if len({(stage.sequence, stage.speeds) for stage in stages}) > 1:
            raise UserError(
                f"The stages of pipeline {number} share sequences over unequal numbers of ranks, or unequally.",
                why="each rank of a stage takes the tokens of one rank of the stage before",
                do="the same `heads`, `context` and `speeds` in each stage",
            )
        for column in range(len(stages[0].ranks) // widths[0]):
            ranks = tuple(
                stage.ranks[column * width : (column + 1) * width] for stage, width in zip(stages, widths, strict=True)
            )
            share = Shard(*plan.ranks[ranks[0][0]].share, plan.micro_batch, rounds=plan.rounds)
            placed.append(Placed(Pipeline(ranks, len(share.cuts) * tasks), tuple(stage.layers for stage in stages)))
    return placed


def check_layers(placed: Sequence[Placed], layers: int) -> None:
    """Raises UserError unless the stages of each pipeline hold all `layers` once, in order."""
    for _, spans in placed:
        if len(spans) > layers:
            raise UserError(
                f"plan.json has {len(spans)} stages for {layers} layers.",
                why="each stage holds a layer at least",
                do=f"plan.pin.pp={layers}",
            )
        ends = [0, *(last for _, last in spans)]
        if [first for first, _ in spans] != ends[:-1] or ends != sorted(set(ends)) or ends[-1] != layers:
            shown = ", ".join(f"{first} to {last}" for first, last in spans)
            raise UserError(
                f"plan.json cannot be run: its stages hold layers {shown}.",
                why=f"the stages of a pipeline hold each of the {layers} layers once",
                do="delete plan.json; it is then planned again",
            )


class Elsewhere(nn.Module):
    """Stands where a module was whose parameters other ranks hold."""


@dataclass(frozen=True)
class Borrowed:
    """A parameter of stage `owner` that stage `user`, on other ranks, takes too.

    Attributes:
        value: the parameter on the owner's ranks, a copy that is no parameter on the user's.
        dtype: as the model was built.
    """

    name: str
    owner: int
    user: int
    value: Tensor
    dtype: torch.dtype


class ModelStages:
    """See above. Has state: `call`, what the model's forward does, which a schedule sets.

    Args:
        model: changed in place.
        pieces: the model in pieces; asked twice, before and after modules are freed.
        placed: the pipeline of this rank; rank: this one's.
        stream: how the residual stream lies on the ranks of a stage. Between stages of unequal numbers of ranks each
            has all of it.

    Attributes:
        held: the stages of this rank.
        borrowed: parameters that this rank lends or borrows.
        first_use: of each parameter of the model, the first piece that uses it: 0 the embedding, then the layers.

    Raises:
        UserError: a parameter belongs to no piece.
    """

    def __init__(
        self,
        model: nn.Module,
        pieces: Callable[[], Pieces],
        placed: Placed,
        rank: int,
        stream: ShardedStream | None = None,
    ) -> None:
        self.model, (self.pipeline, self.layers) = model, placed
        self.local_stages, self.last = self.pipeline.stages_of(rank), len(self.layers) - 1
        self.stream = stream
        uses = [set(map(id, self._tensors(pieces(), stage))) for stage in range(len(self.layers))]
        everywhere = set().union(*uses)
        for name, parameter in model.named_parameters():
            if id(parameter) not in everywhere:
                raise UserError(
                    f"{type(model).__name__} cannot be cut into stages: {name} is in none of its pieces.",
                    do="name its module in `Pieces.modules`, or plan.pin.pp=1",
                )
        self.first_use = _first_use(model, pieces())
        used: set[int] = set().union(*(uses[stage] for stage in self.local_stages))
        self.borrowed = list(self._shared(uses))
        free(model, used, everywhere)
        self.pieces = pieces()
        self.call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any] = self._whole
        model.forward = self._forward

    def given(self, inputs: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """What every stage is told of a forward pass. A cache changes while stages compute, so all of a rank's stages
        are told the same."""
        return self.pieces.given(*inputs, **options)

    def compute(self, stage: int, x: Any, given: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """What `stage` makes of `x`. `inputs`, `options`: what the model's forward takes."""
        if stage == 0:
            x = self.pieces.embed(*inputs, **options)
        elif self._unequal(stage - 1):
            x = self._converted(x, "part")
        for block in self.pieces.blocks[slice(*self.layers[stage])]:
            x = block(x, given)
        if stage == self.last:
            return self.pieces.head(x, given)
        return self._converted(x, "whole") if self._unequal(stage) else x

    def _converted(self, x: Any, what: Literal["part", "whole"]) -> Any:
        """Streams [batch, seq, width] in `x` as the whole of them, or as this rank's part."""
        if self.stream is None:
            return x
        convert = getattr(self.stream, what)
        return tree_map(lambda value: convert(value) if isinstance(value, Tensor) and value.ndim == 3 else value, x)

    def _unequal(self, stage: int) -> bool:
        """Whether more or fewer ranks hold the stage after."""
        first, other = self.pipeline.stages[stage : stage + 2]
        return len(first) != len(other)

    def _forward(self, *inputs: Any, **options: Any) -> Any:
        return self.call(inputs, options)

    def _whole(self, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        raise AssertionError("a stage is called by its schedule")

    def _tensors(self, pieces: Pieces, stage: int) -> Iterator[Tensor]:
        """Parameters and buffers that a stage uses."""
        first, last = self.layers[stage]
        start = 0 if stage == 0 else 1 + first
        stop = 2 + last if stage == self.last else 1 + last
        for modules in pieces.modules[start:stop]:
            for module in modules:
                yield from module.parameters()
                yield from module.buffers()

    def _shared(self, uses: Sequence[set[int]]) -> Iterator[Borrowed]:
        """What this rank lends or borrows. What it borrows becomes a copy that is no parameter."""
        stages = self.pipeline.stages
        for name, parameter in list(self.model.named_parameters()):
            cells: dict[tuple[int, ...], int] = {}
            for stage in range(len(stages)):
                if id(parameter) in uses[stage]:
                    cells.setdefault(stages[stage], stage)
            (owner, *users) = cells.values()
            for user in users:
                if owner in self.local_stages:
                    yield Borrowed(name, owner, user, parameter, parameter.dtype)
                elif user in self.local_stages:
                    copy = parameter.detach().clone().requires_grad_(parameter.requires_grad)
                    _replace(self.model, parameter, copy)
                    uses[user].add(id(copy))
                    yield Borrowed(name, owner, user, copy, copy.dtype)


def _first_use(model: nn.Module, pieces: Pieces) -> dict[str, int]:
    number: dict[int, int] = {}
    for piece, modules in enumerate(pieces.modules):
        for module in modules:
            for parameter in module.parameters():
                number.setdefault(id(parameter), piece)
    return {name: number[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in number}


def add_peers(
    cut: ModelCut, stages: ModelStages, placed: Sequence[Placed], alike: Mapping[int, int], rank: int
) -> None:
    """Says in `cut` which ranks hold the same part of each parameter as `rank` does, one in each pipeline: gradients
    are summed over them, as FlashFlex does layer by layer (arXiv 2409.01143). Where pipelines cut its matrices over
    unlike numbers of ranks it is all of their ranks. The loss is divided by the weight of the whole batch before
    backward, so pipelines with more samples count more by themselves.

    Args:
        stages: what this rank holds.
        placed: all pipelines, by ranks of the first replica.
        alike: of each rank of this replica, the one of the first replica in its place.
        rank: this one.
    """
    position = {first: rank for rank, first in alike.items()}
    peers: dict[int, Ranks] = {}
    recut: dict[int, Recut] = {}
    for piece in sorted(set(stages.first_use.values())):
        groups = [_holders(stages_of, piece) for stages_of in placed]
        own_group = next((group for group in groups if alike[rank] in group), None)
        if own_group is None:
            continue
        place = own_group.index(alike[rank])
        if len({len(group) for group in groups}) > 1:
            peers[piece] = tuple(sorted(position[rank] for group in groups for rank in group))
            recut[piece] = Recut(len(groups), own_group is groups[0], place == 0)
        else:
            peers[piece] = tuple(sorted(position[group[place]] for group in groups))
    cut.peers = {name: peers[piece] for name, piece in stages.first_use.items() if piece in peers}
    cut.recut = {name: recut[piece] for name, piece in stages.first_use.items() if piece in recut}


def _holders(placed: Placed, piece: int) -> Ranks:
    """The ranks of the stage that has a piece of the model: 0 the embedding, then the layers, then the head."""
    last = placed.layers[-1][1]
    layer = min(max(piece - 1, 0), last - 1)
    stage = next(number for number, (first, end) in enumerate(placed.layers) if first <= layer < end)
    return placed.pipeline.stages[stage]


def check_borrowed(stages: ModelStages) -> None:
    """Raises UserError where a parameter is shared by stages of unequal numbers of ranks, which cut it differently."""
    for borrowed in stages.borrowed:
        owner, user = (len(stages.pipeline.stages[stage]) for stage in (borrowed.owner, borrowed.user))
        if owner != user:
            raise UserError(
                f"{borrowed.name} is used by stage {borrowed.owner} on {owner} ranks "
                f"and by stage {borrowed.user} on {user}.",
                why="what two stages share is cut in the same way on both",
                do="model.tied=false, or as many ranks to a matrix in both stages",
            )


def check_trained(model: nn.Module, pieces: Pieces) -> None:
    """Raises UserError where all parameters of a piece are frozen."""
    for number, modules in enumerate(pieces.modules):
        trained = [parameter.requires_grad for module in modules for parameter in module.parameters()]
        if trained and not any(trained):
            raise UserError(
                f"{type(model).__name__} cannot be cut into stages: all parameters of its piece {number} are frozen.",
                why="a stage trains what it holds",
                do="plan.pin.pp=1",
            )


def _replace(model: nn.Module, parameter: nn.Parameter, copy: Tensor) -> None:
    """Puts `copy` wherever `parameter` is, as a plain attribute."""
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            if value is parameter:
                del module._parameters[name]
                setattr(module, name, copy)


def free(module: nn.Module, used_here: set[int], everywhere: set[int]) -> None:
    """Takes away what is in some stage's pieces and not in `used_here`."""
    for name, value in list(module._parameters.items()):
        if value is not None and id(value) not in used_here:
            module._parameters[name] = None
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        tensors = {id(tensor) for tensor in (*child.parameters(), *child.buffers())} & everywhere
        used = {id(value) for part in child.modules() for value in vars(part).values() if isinstance(value, Tensor)}
        if tensors and not (tensors | used) & used_here:
            module._modules[name] = Elsewhere()
        elif tensors - used_here:
            free(child, used_here, everywhere)


def no_pieces(model: nn.Module) -> UserError:
    """The error for a model that cannot be cut."""
    return UserError(
        f"{type(model).__name__} cannot be cut into stages.",
        why="it is no nn.Sequential, and nothing says which of its modules come one after the other",
        do="return `pieces` from model.build (src/espalier/mechanisms/pipeline/README.md shows how), or plan.pin.pp=1",
    )
