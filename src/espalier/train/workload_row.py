"""One row of the workload registry: how a kind of model opens its data, what the planner asks, and what it can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from espalier.parallel.workload import PackStart, Progress, Shard, Workload
from espalier.recipe import Recipe
from espalier.recipe.base import Derivation
from espalier.recipe.cost import Profile


@dataclass(frozen=True)
class Opening:
    """What a workload is opened with.

    Attributes:
        folder: where the recipe's file lies.
        progress: told how far reading is.
        data: `Prepared.data`.
        frozen: the folder that `Freezes.freeze` has filled when the run began: its decisions hold, and the data is
            mapped to them by name or refused by name. None: the run begins, or a version that froze nothing began it.
        reads: whether the data is read; False: `frozen` has all that is needed, for predictions and exports.
    """

    folder: Path | None = None
    progress: Progress = lambda done, total: None
    data: Any = None
    frozen: Path | None = None
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


ROWS = 8
"""Prompts that a model continues together."""


@dataclass(frozen=True)
class Sampling:
    """How text is drawn from a model.

    Attributes:
        tokens: that it has at most.
        temperature: 0 takes the likeliest token; above, tokens are drawn from softmax(logits / temperature).
        top_k, top_p: draws among this many likeliest tokens only, or among those whose probabilities add up to this.
        seed: makes the draw repeatable.
        stop: texts that end it, and are not in it.
        logprobs: how many of the likeliest tokens are named with each token; None: nothing is said of them.
    """

    tokens: int = 200
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


class TokenScore(NamedTuple):
    """The text of a token, the logarithm of its probability, and both of the `likeliest` in its place."""

    text: str
    logprob: float
    likeliest: Sequence[tuple[str, float]]


class TextPiece(NamedTuple):
    """What a step adds to the text of the prompt `row`.

    Attributes:
        finish: why the text ends here: `stop` or `length`; None: it goes on.
        tokens: how many it took; 0 while prompts are read.
    """

    row: int
    text: str = ""
    finish: str | None = None
    tokens: int = 0
    score: TokenScore | None = None


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


@runtime_checkable
class Row(Protocol):
    """What the planner and the verbs do with every kind of model.

    What only some kinds can do is a Protocol of its own, below: the class of a row inherits those that it answers, and
    a verb asks `isinstance(row, Writes)`. `workload` and `model` are of the row's own kind.

    Attributes:
        reading: shown while data is read.
    """

    reading: str = "Reading the data"

    def open(self, recipe: Recipe, opening: Opening) -> Workload:
        """The workload of a resolved recipe, its data opened."""

    def profile(self, recipe: Recipe, opened: Callable[[], Any]) -> Profile:
        """Of a resolved recipe. `opened` opens the workload; called only if the profile depends on the data."""

    def contents(self, recipe: Recipe, workload: Any) -> Mapping[str, str]:
        """Hashes of the data's files by name, compared when a run is resumed."""
        return workload.contents()

    def prepare(self, recipe: Recipe, opening: Opening) -> Prepared:
        """The recipe after a look at the data, as far as options depend on it: here on none."""
        return Prepared(recipe)


@runtime_checkable
class Freezes(Protocol):
    """Keeps what preprocessing decided (tokenizer, classes, splits) in the run folder."""

    def freeze(self, workload: Any, folder: Path) -> None:
        """Writes it into the empty `folder`, which `Row.open` is given as `Opening.frozen`."""

    def suffices(self, frozen: Path, evaluation: bool) -> bool:
        """Whether predictions (`evaluation`: the validation too) read nothing besides the folder `frozen`."""


@runtime_checkable
class Packs(Protocol):
    """Packs the batches of recipes with a [store]."""

    def pack(self, workload: Any, shards: Sequence[Shard], packing: PackStart) -> None:
        """Packs those of `shards`, the ranks of a machine."""


@runtime_checkable
class Predicts(Protocol):
    """Answers inputs of `espalier predict`."""

    def answer(self, workload: Any, model: Any, text: str | None, sampling: Sampling) -> Answer:
        """To the input `text`; None: none was given. Raises UserError for an input that means nothing."""

    def answers(self, workload: Any, model: Any, texts: Sequence[str | None], sampling: Sampling) -> Sequence[Answer]:
        """To several inputs, to be read in their order. Raises UserError where one of them means nothing."""
        return [self.answer(workload, model, text, sampling) for text in texts]

    def rows(self, workload: Any, model: Any, text: str | None, sampling: Sampling) -> Iterable[Mapping[str, Any]]:
        """The answer to `text` as rows of a table, all of the same columns. Raises UserError as `answer`."""
        return [self.answer(workload, model, text, sampling).record()]

    def usage(self, recipe: Mapping[str, Any]) -> tuple[str, str]:
        """(what an answer is, what follows `espalier predict RUN`), by the recipe's tables."""
        return "answers", ""


class Writer(NamedTuple):
    """What continues prompts of tokens in text, several together.

    Attributes:
        prompt: the tokens of a text, or of the turns of a chat, (role, text), up to its next answer. Raises UserError
            for turns that the model was not trained on.
        write: what follows each prompt, in pieces. Raises UserError, before the first, for prompts and samplings that
            mean nothing.
        context: tokens of a prompt and what follows it that the model sees at once.
    """

    prompt: Callable[[str | Sequence[tuple[str, str]]], list[int]]
    write: Callable[[Sequence[Sequence[int]], Sequence[Sampling]], Iterator[TextPiece]]
    context: int


@runtime_checkable
class Writes(Protocol):
    """Continues prompts in text."""

    def writer(self, workload: Any, model: Any) -> Writer:
        """What does."""


@runtime_checkable
class Tokenizes(Protocol):
    """Has a tokenizer, for tasks that ask questions in text."""

    def tokenizer(self, workload: Any) -> Any:
        """The workload's `language.tokenizer.Tokenizer`."""


@runtime_checkable
class Exports(Protocol):
    """Writes the trained model in forms of its own.

    Attributes:
        exports: form -> (workload, model, folder), which writes the model there and returns how to load it.
    """

    exports: ClassVar[Mapping[str, Callable[[Any, Any, Path], str]]]


@runtime_checkable
class LoadsPacked(Protocol):
    """Has an export that predicts without a checkpoint."""

    def load_packed(self, model: Any, folder: Path) -> bool:
        """Whether `folder` is such an export; it then fills `model`."""


@runtime_checkable
class Renders(Protocol):
    """Renders animations of a scene."""

    def turntable(self, workload: Any, model: Any, file: Path) -> str:
        """Writes one of a way round the scene into `file`, and returns what was written."""


@runtime_checkable
class CountsEnergy(Protocol):
    """Counts what an inference takes."""

    def energy(self, workload: Any, model: Any) -> EnergyTables:
        """Operations and bytes of one inference."""


@runtime_checkable
class CutsIntoParts(Protocol):
    """Cuts a graph into parts that ranks train on."""

    def cut(self, workload: Any, shares: Sequence[int], folder: Path) -> None:
        """Writes each rank's part into `folder`. `shares`: nodes of each, relative to one another."""
