"""The Workload Protocol: what is trained. A workload builds a model, gives batches, a loss and an evaluation.

A workload knows nothing of ranks beyond the `Shard` it is asked for, and keeps no position: the batches of a step are a
pure function of (seed, step, shard), so a run resumes exactly without any reader state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from espalier.recipe.cost import Anatomy, Cut, Work

if TYPE_CHECKING:
    from torch import nn

    from espalier.recipe import Recipe
    from espalier.store.artifacts import Artifact

Averages = Mapping[str, float]
"""Figures by name, each a mean over samples."""
SummedLoss = tuple[Tensor, Tensor]
"""The sum of losses of a batch, and the weight that it is divided by."""
Progress = Callable[[int, int], None]
"""Called with (done, total) while data is read."""

Sums = Mapping[str, tuple[float, float]]
"""Metric to (sum, weight)."""

Batch = Any  # what `batches` yields and `loss` takes: a NamedTuple of tensors


@dataclass(frozen=True)
class Shard:
    """The part of each global batch one rank computes: samples `[start, stop)` in micro-batches of `micro_batch`.

    `sequence_slot` of `sequence_slots` says which part of the sequence it holds (one slot: all of it); `sequence_heads`
    consecutive slots share the heads, in proportion to `sequence_speeds` (see `parallel.sequence_slots`). With
    `rounds` there
    are exactly so many micro-batches, of nearly equal size.
    """

    start: int
    stop: int
    micro_batch: int
    sequence_slot: int = 0
    sequence_slots: int = 1
    sequence_heads: int = 1
    sequence_speeds: tuple[float, ...] = ()
    rounds: int | None = None

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """The samples `[from, to)` of each micro-batch."""
        if self.rounds is None:
            return [
                (at, min(at + self.micro_batch, self.stop)) for at in range(self.start, self.stop, self.micro_batch)
            ]
        ends = [self.start + (self.stop - self.start) * index // self.rounds for index in range(self.rounds + 1)]
        return list(itertools.pairwise(ends))


class PackStart(NamedTuple):
    """How packing is begun: who is told how far it is, whether other ranks of the run may be packing the same, and
    bytes of features that each rank keeps on its GPU."""

    progress: Progress | None = None
    waits: bool = False
    device: int = 0


ALONE = PackStart()
"""One process packs for all ranks of its machine."""


@dataclass(frozen=True)
class Phase:
    """Steps `[start, stop)` in which the model keeps its shape; a plan is made anew at each boundary."""

    start: int
    stop: int
    name: str = "train"


class Tagged(NamedTuple):
    """A micro-batch of one task, by its position in `Workload.tasks`."""

    task: int
    batch: Any


HEAD = "head"
"""The part of a task that gives its losses."""


class TaskNode(NamedTuple):
    """A part of a task that ranks can run apart: a tower of so many operators, or its `HEAD`. `needs`: the parts whose
    outputs it takes, in order. `whole`: it needs all samples of the batch at once."""

    name: str
    operators: int
    needs: tuple[str, ...]
    whole: bool = False


class Outcome(NamedTuple):
    """What a rank computed in one step: sums over its micro-batches, detached float64 scalars.

    `tasks`: float64 [task, 2], each task's own loss and weight, where there are several.
    """

    loss: Tensor
    weight: Tensor
    tasks: Tensor | None = None


def _nothing_given(*inputs: Any, **options: Any) -> None:
    """Pieces that take nothing beside `x`."""


@dataclass(frozen=True)
class Pieces:
    """A model in the order in which it computes, so that a schedule may run its pieces on different ranks.

    Attributes:
        embed: makes `x` of what the model's forward takes: a tensor, or a tuple of tensors.
        blocks: each makes the next `x` of (`x`, `given`).
        head: makes what the model's forward gives of (`x`, `given`).
        modules: of `embed`, each of `blocks` and `head`, the modules whose parameters it uses.
        given: makes of what the model's forward takes what every piece needs beside `x`. It uses no parameters, as
            every rank computes it.
    """

    embed: Callable[..., Any]
    blocks: Sequence[Callable[[Any, Any], Any]]
    head: Callable[[Any, Any], Any]
    modules: Sequence[Sequence[nn.Module]]
    given: Callable[..., Any] = _nothing_given

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """All of them in turn: what the model gives."""
        given = self.given(*inputs, **options)
        x = self.embed(*inputs, **options)
        for block in self.blocks:
            x = block(x, given)
        return self.head(x, given)


def in_sequence(modules: Sequence[nn.Module]) -> Pieces:
    """Of modules that are called one after the other, as those of an `nn.Sequential`."""

    def called(module: nn.Module) -> Callable[[Any, Any], Any]:
        return lambda x, given: module(x)

    return Pieces(
        lambda inputs: inputs,
        list(map(called, modules)),
        lambda x, given: x,
        [[], *([module] for module in modules), []],
    )


class Skeleton(NamedTuple):
    """A model whose parameters may be on the meta device, and its initial values one by one: fp32, by name."""

    model: nn.Module
    value: Callable[[str], Tensor]


class Role(NamedTuple):
    """What a module of a model does where ranks share its matrices (tensor parallelism).

    Attributes:
        kind: `column`, `row`: a `Linear` cut by its outputs or inputs; `table`: an `Embedding` or a head cut by words;
            `words`: a `Linear` cut by outputs that every rank then gets whole; `head`: the module whose seams `predict`
            and `score` use a table or head that is cut, and whose `turn` and `through` know of the tokens; `columns`,
            `rows`: a `Linear` cut without an exchange, inside a `region`, which needs all tokens and gives each rank's
            part of a sum; `partial`: every rank has it, and its gradient is the sum of theirs. Whatever has no role is
            on every rank, with the same gradient.
        share: (rank, ranks) to the `[first, last)` of its rows or columns; None: as even as can be.
        copies: ranks to how many neighbours hold the same part.
        unit: what cannot be divided, for messages.
    """

    kind: str
    share: Callable[[int, int], tuple[int, int]] | None = None
    copies: Callable[[int], int] | None = None
    unit: str = "rows"


class Workload(Protocol):
    """One family of models, opened by `train.workload_registry`. `model`: what its `build` gives."""

    global_batch: int
    """Samples in the global batch of one step."""

    nominal_weight: float
    """The usual total weight of a global batch (tokens, for language). Losses are divided by it before backward."""

    whole_evaluation: bool
    """Whether one held-out sample costs as much to evaluate as all of them (a graph is passed over whole)."""

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The whole model with its initial weights, the same on every rank (seeded)."""

    def skeleton(self) -> Skeleton:
        """The model for ranks that never hold all of it, on the CPU, with the initial values of `build`."""

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        """The repeated blocks of `model` in forward order: the units of recomputation, compilation and sharding."""

    def pieces(self, model: Any) -> Pieces | None:
        """`model` in pieces that give together what its forward gives, to the bit; None where it has no such order."""

    def roles(self, model: Any) -> Mapping[str, Role] | None:
        """How ranks may share `model`: patterns of module names to roles. With a `partial` among them its residual
        stream is sharded along the tokens. None: the model says it itself (`tp_plan`)."""

    def embeddings(self, model: Any) -> Sequence[nn.Parameter]:
        """Tables and heads: matrices that are not hidden layers, so Muon leaves them to AdamW."""

    def recompute(self, model: Any, mode: str) -> None:
        """Makes `model` keep less for backward (`none | selective | block`). Raises UserError if it cannot."""

    def batches(self, step: int, shard: Shard) -> Sequence[Batch]:
        """The micro-batches of `step`, one for each of the shard's `cuts`, on the CPU. Pure in (seed, step, shard)."""

    def loss(self, model: Any, batch: Batch) -> SummedLoss:
        """(sum of losses, weight): scalars; never a mean. Their totals over the global batch give the loss."""

    def evaluate(self, model: Any, shard: Shard) -> Sums:
        """Held-out figures of this shard as name to (sum, weight); ranks add them up before dividing. Calls the model
        once for each of the shard's `cuts`."""

    def validation_samples(self) -> int:
        """How many held-out samples `evaluate` divides among the ranks."""

    def summary(self, totals: Averages) -> Averages:
        """Figures people read, from the divided totals of `evaluate` (for language: adds bits_per_byte)."""

    def documents(self, step: int, shard: Shard) -> Sequence[str]:
        """Names of the documents in that shard's batch, for error messages."""

    def sample(self, model: Any) -> Sequence[Artifact]:
        """Glimpses of what the model does now, for people; empty when there are none."""

    def fingerprint(self) -> str:
        """Hash of the data's content; ranks compare it at start."""

    def notes(self) -> Sequence[str]:
        """What the user should know of the data: what was skipped, cut or mended."""

    def phases(self) -> Sequence[Phase]:
        """The phases of the run, in order. A workload that `at` gave has its own phase alone."""

    def at(self, phase: Phase) -> Workload:
        """The workload of one of its `phases`: what it builds and reads there."""

    def carry(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What the state of the model before becomes in this phase's. Entries that this phase's model lacks or has in
        another shape are left out; what it has beyond them is as built."""

    def tasks(self) -> Mapping[str, float]:
        """The tasks trained together, and how much the losses of each count in the sum. With several, batches are
        `Tagged`, one of each task for each of the shard's `cuts`, and `evaluate` adds `tasks.NAME` for each."""

    @property
    def meters(self) -> Mapping[str, Callable[[], Any]]:
        """What every step says of its data, by name of the event's field."""

    def work(self, micro_batch: Any, recompute: str, precision: str) -> Work:
        """Operations and bytes of one micro-batch of `micro_batch` samples (NumPy arrays allowed)."""


class Plain:
    """The answers of a workload of one phase and one task, whose model every rank builds whole."""

    recipe: Recipe
    meters: Mapping[str, Callable[[], Any]] = {}
    whole_evaluation = False

    def skeleton(self: Workload) -> Skeleton:
        """The model as it is built, which has its initial values until they are changed."""
        model = self.build(torch.device("cpu"), torch.float32)
        values = dict(model.named_parameters())
        return Skeleton(model, lambda name: values[name].detach().float())

    def anatomy(self: Workload, micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        """All of it is one layer: nobody knows where the model can be cut. Ranks that share its matrices divide the
        products; what they keep is taken for whole."""
        nothing = Work((), 0.0, 0.0, 0.0, 0.0, 0.0, micro_batch, micro_batch)
        work = self.work(micro_batch, recompute, precision)
        products = tuple(replace(product, rows=product.rows / cut.tensor) for product in work.products)
        return Anatomy(1, replace(work, products=products), nothing)

    def phases(self) -> Sequence[Phase]:
        return [Phase(0, self.recipe.train.steps or 0)]

    def at(self, phase: Phase) -> Self:
        return self

    def carry(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return state

    def pieces(self, model: Any) -> Pieces | None:
        return None

    def roles(self, model: Any) -> Mapping[str, Role] | None:
        return None

    def tasks(self) -> Mapping[str, float]:
        return {"main": 1.0}


def to_device(batch: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """`batch` with its tensors on `device`, the floating ones in `dtype`; tuples, lists and dicts keep their form."""
    if isinstance(batch, Tensor):
        return batch.to(device=device, dtype=dtype if batch.is_floating_point() else None, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(item, device, dtype) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(item, device, dtype) for item in batch)
    if isinstance(batch, dict):
        return {key: to_device(value, device, dtype) for key, value in batch.items()}
    return batch
