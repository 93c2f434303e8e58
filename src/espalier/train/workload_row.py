"""One row of the workload registry: how a kind of model opens its data, and what the planner and the verbs may ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from espalier.parallel.workload import PackStart, Progress, Shard, Workload
from espalier.recipe import Recipe
from espalier.recipe.base import Derivation
from espalier.recipe.cost import ModelCosts


def _silently(done: int, total: int) -> None:
    """Tells nobody how far reading is."""


@dataclass(frozen=True)
class Opening:
    """What a workload is opened with.

    Attributes:
        folder: where the recipe's file lies.
        progress: told how far reading is.
        data: `Prepared.data`.
        kept: the folder that `Row.freeze` has filled when the run began: its decisions hold, and the data is mapped to
            them by name or refused by name. None: the run begins, or was begun by a version that kept none.
        reads: whether the data is read; False: what is in `kept` has to do, for predictions and exports.
    """

    folder: Path | None = None
    progress: Progress = _silently
    data: Any = None
    kept: Path | None = None
    reads: bool = True


class Prepared(NamedTuple):
    """A recipe whose data has been looked at as far as its options depend on it.

    `vocabulary`: the tokenizer's tokens, where they are known. `data`: what was opened, for `Row.open`. `derivations`:
    options that were left open and that the data decided.
    """

    recipe: Recipe
    vocabulary: int | None = None
    data: Any = None
    derivations: Sequence[Derivation] = ()


@dataclass(frozen=True)
class Tally:
    """A model counted: parameters, trainable ones, their tensors, and hidden matrices by (rows, columns)."""

    parameters: int
    trainable: int
    tensors: int
    matrices: Counter[tuple[int, int]]
    sizes: Sequence[Any] = ()
    """`train.wrap_policy.Sized` of the trainable ones, in order; empty: not known."""
    running: tuple[int, int] = (0, 0)
    """Floating-point and whole numbers in buffers that every step moves."""

    def with_more(self, other: Tally, times: int) -> Tally:
        """This model grown `times` times by what `other` has beyond it."""
        return Tally(
            self.parameters + times * (other.parameters - self.parameters),
            self.trainable + times * (other.trainable - self.trainable),
            self.tensors + times * (other.tensors - self.tensors),
            Counter({s: self.matrices[s] + times * (n - self.matrices[s]) for s, n in other.matrices.items()}),
        )


def tally(model: nn.Module, embeddings: Iterable[nn.Parameter]) -> Tally:
    """Counts `model`; a tied parameter is counted once."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    outside = set(embeddings)
    matrices = (p for p in trainable if p.ndim == 2 and p not in outside)
    return Tally(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(parameter.numel() for parameter in trainable),
        tensors=len(trainable),
        matrices=Counter((matrix.shape[0], matrix.shape[1]) for matrix in matrices),
    )


@dataclass(frozen=True, kw_only=True)
class Profile(ModelCosts):
    """What the planner is told of a model and its data. `tally`: the model counted."""

    tally: Tally


@dataclass(frozen=True)
class Sampling:
    """How text is drawn from a model."""

    tokens: int = 200
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0


class Answer(NamedTuple):
    """What a model says to an input: `text` as it is made, or (not both) `record` for programs."""

    text: Iterator[str]
    record: Callable[[], Mapping[str, Any]]


class EnergyTables(NamedTuple):
    """What an inference takes: `what` it is of, operations and bytes by part (`kernels.counts.Counts`), and tables
    besides, each (title, columns, rows)."""

    what: str
    parts: Mapping[str, Any]
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[Any]]]] = ()


def _fingerprint(recipe: Recipe, workload: Workload) -> Mapping[str, str]:
    """All data as one."""
    return {"the data": workload.fingerprint()}


def _nothing_to_freeze(workload: Workload, folder: Path) -> None:
    """Its data says all."""


def _nothing_to_pack(workload: Workload, shards: Sequence[Shard], packing: PackStart) -> None:
    """No recipe of this kind has a [store]."""


def _as_it_is(recipe: Recipe, opening: Opening) -> Prepared:
    """No option depends on the data."""
    return Prepared(recipe)


@dataclass(frozen=True)
class Row:
    """What the planner and the verbs do with one kind of model.

    Attributes:
        open: (resolved recipe, `Opening`) -> the workload, its data opened.
        profile: of a resolved recipe; it opens the workload only if it has to.
        reading: what is said while data is read.
        prepare: looks at the data as far as options depend on it.
        freeze: (workload, empty folder), which writes what preprocessing decided there: tokenizer, classes, splits.
        evaluates: whether the frozen folder holds what evaluation reads too.
        lacks: whether a frozen folder holds less than predictions and evaluation read.
        pack: of a recipe with a [store], (workload, shards of a machine's ranks, `PackStart`): packs their batches.
        answer: (workload, model, input, sampling) -> Answer. None: nobody knows what an input is.
        exports: format -> (workload, model, folder), which writes the model there and says how to load it.
        contents: name -> hash of the data's files, compared when a run is taken up again.
        tokenizer: of the workload, for tasks that ask questions in text.
        usage: of the recipe's tables, how people ask a trained model: (word, what follows `espalier predict RUN`).
        reply: (workload, model, turns of a chat as (role, text), sampling) -> the next answer in pieces; raises
            UserError for a run that was not trained on conversations. None: no run of this kind is.
        turntable: of a scene, (workload, model, file) -> what was written: an animation of a way round it.
        energy: (workload, model) -> what an inference takes. None: nobody has counted it.
        cut: of a graph, (workload, the ranks' shares of the nodes, folder), which writes each rank's part there.
            None: no run of this kind trains on parts.
        packed: (model, folder) -> whether the folder is an export that predicts by itself, with which the model is
            filled then.
    """

    open: Callable[[Recipe, Opening], Workload]
    profile: Callable[[Recipe, Callable[[], Workload]], Profile]
    reading: str = "Reading the data"
    prepare: Callable[[Recipe, Opening], Prepared] = _as_it_is
    freeze: Callable[[Workload, Path], None] = _nothing_to_freeze
    evaluates: bool = False
    lacks: Callable[[Path], bool] = lambda kept: False
    pack: Callable[[Workload, Sequence[Shard], PackStart], None] = _nothing_to_pack
    answer: Callable[[Workload, nn.Module, str | None, Sampling], Answer] | None = None
    exports: Mapping[str, Callable[[Workload, nn.Module, Path], str]] = field(default_factory=dict)
    contents: Callable[[Recipe, Workload], Mapping[str, str]] = _fingerprint
    tokenizer: Callable[[Workload], Any] | None = None
    usage: Callable[[Mapping[str, Any]], tuple[str, str]] = lambda recipe: ("answers", "")
    reply: Callable[[Workload, nn.Module, Sequence[tuple[str, str]], Sampling], Iterator[str]] | None = None
    turntable: Callable[[Workload, nn.Module, Path], str] | None = None
    energy: Callable[[Workload, nn.Module], EnergyTables] | None = None
    cut: Callable[[Workload, Sequence[int], Path], None] | None = None
    packed: Callable[[nn.Module, Path], bool] = lambda model, folder: False
