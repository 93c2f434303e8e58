"""Anybody's `nn.Module` as a workload: `[model] kind = "module", build = "package.module:function"`.

The function is called with `[model.arguments]` and returns `Parts`: a model, a dataset, a loss, and maybe a held-out
dataset; or several tasks, or phases. It must give the same models and data whenever it is called (seed what is random).
Whatever its author's code raises becomes a UserError that names the line.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from espalier.module.parts import (
    READING,
    Counted,
    Parts,
    Task,
    checked,
    collated,
    content,
    has_data,
    length,
    tasks_of,
    tensors,
    trial,
)
from espalier.parallel.tensor_roles import OWN_PLAN, check_ranks
from espalier.parallel.workload import (
    Averages,
    Phase,
    Pieces,
    Plain,
    Shard,
    SummedLoss,
    Sums,
    Tagged,
    in_sequence,
    to_device,
)
from espalier.recipe import Module as Options
from espalier.recipe import Recipe
from espalier.recipe.cost import VALUE_BYTES, Product, Profile, Work
from espalier.recipe.errors import EspalierError, UserError
from espalier.recipe.import_function import Author, function, keep_sources
from espalier.store.artifacts import Artifact
from espalier.train.workload_row import Freezes, Opening, Row
from espalier.train.wrap_policy import blocks_of, profile


class ModuleWorkload(Plain):
    """The Protocol's answer for a foreign module. `train.batch_tokens` counts samples of each task here.

    `phase` and `carried`: of the workload of one phase, what it is and how it begins.
    """

    def __init__(
        self, recipe: Recipe, parts: Parts, author: Author, phase: Phase | None = None, carried: Any = None
    ) -> None:
        self.recipe = recipe
        self.parts = parts
        self.author = author
        self._phase, self._carried = phase, carried
        self._counted = trial(parts, author) if has_data(parts) else Counted(0.0, 0.0)
        self.size = min(length(task.dataset) for task in self._tasks.values()) if has_data(parts) else 0
        self.global_batch = recipe.train.batch_tokens or min(32, self.size)
        self.nominal_weight = float(self.global_batch * len(self._tasks))
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}
        self._dtype = torch.float32
        self._given = copy.deepcopy(parts.model.state_dict())

    @property
    def _tasks(self) -> dict[str, Task]:
        return tasks_of(self.parts)

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The module as `build` gave it, every time anew."""
        model = self.parts.model
        model.load_state_dict(self._given)
        self._dtype = dtype
        return model.to(device=device, dtype=dtype)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The entries of its lists of layers, where it has any; else the module is one block."""
        return blocks_of(model) or [model]

    def pieces(self, model: nn.Module) -> Pieces | None:
        """What its author says, or the entries of an `nn.Sequential`."""
        if self.parts.pieces is not None:
            with self.author.answers("when it was asked for its pieces"):
                return self.parts.pieces(model)
        return in_sequence(list(model)) if isinstance(model, nn.Sequential) else None

    def embeddings(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """Tables, and the last matrix, which is taken for the head."""
        tables = [
            parameter
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
            for parameter in module.parameters(recurse=False)
        ]
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return [*tables, *matrices[-1:]]

    def recompute(self, model: nn.Module, mode: str) -> None:
        """Only `none`: where a foreign module may be cut is its author's to say."""
        if mode != "none":
            raise UserError(
                f"train.recompute = {mode!r} needs the model's blocks.",
                why=f"{self.author.build!r} builds a foreign module",
                do='train.recompute = "none", and call torch.utils.checkpoint inside the module',
            )

    # --- the data ------------------------------------------------------------------------------------------------

    def batches(self, step: int, shard: Shard) -> list[Any]:
        """Samples of a seeded permutation per epoch, collated; of each task in turn where there are several."""
        batches: list[Any] = []
        before = step * self.global_batch
        with self.author.answers(READING):
            for start, stop in shard.cuts:
                made = (
                    collated(part.dataset, self._indices(k, before + start, before + stop))
                    for k, part in self._numbered()
                )
                batches += made if len(self._tasks) == 1 else (Tagged(k, batch) for k, batch in enumerate(made))
        return batches

    def _numbered(self) -> list[tuple[int, Task]]:
        return list(enumerate(self._tasks.values()))

    def _indices(self, task: int, first: int, last: int) -> list[int]:
        """The samples [first, last) of all that a task is trained on, epoch after epoch."""
        size, indices = length(self._numbered()[task][1].dataset), []
        for number in range(first, last):
            epoch, place = divmod(number, size)
            indices.append(int(self._permutation(task, epoch, size)[place]))
        return indices

    def _permutation(self, task: int, epoch: int, size: int) -> NDArray[np.int64]:
        known = self._orders.get(task)
        if known is None or known[0] != epoch:
            seeds = [self.recipe.train.seed, epoch, *([task] if task else [])]
            known = self._orders[task] = (epoch, np.random.default_rng(seeds).permutation(size))
        return known[1]

    def loss(self, model: nn.Module, batch: Any) -> SummedLoss:
        """The module's own loss; floating inputs take the precision of the run."""
        task, batch = (batch.task, batch.batch) if isinstance(batch, Tagged) else (0, batch)
        with self.author.answers("in its loss"):
            return self._numbered()[task][1].loss(model, to_device(batch, dtype=self._dtype))

    def evaluate(self, model: nn.Module, shard: Shard) -> Sums:
        """Loss and metrics on the held-out samples of `shard`, and the loss of each task where there are several."""
        sums = {key: torch.zeros(2, dtype=torch.float64) for key in self._figures()}
        device = next(model.parameters()).device
        for start, stop in shard.cuts:
            for k, (name, task) in enumerate(self._tasks.items()):
                for what, pair in self._held_out(model, k, task, self._share(task, start, stop), device).items():
                    sums[self._key(name, what)] += pair
        if len(self._tasks) > 1:
            for name, task in self._tasks.items():
                sums["loss"] += sums[f"tasks.{name}"] * torch.tensor([task.weight, 1.0])
        return {key: (float(pair[0]), float(pair[1])) for key, pair in sums.items()}

    def _key(self, task: str, what: str) -> str:
        """What a validation calls a figure of a task."""
        if len(self._tasks) == 1:
            return what
        return f"tasks.{task}" if what == "loss" else f"{task}.{what}"

    def _figures(self) -> list[str]:
        """Every figure of a validation, the same on all ranks."""
        names = zip(self._tasks, self._counted.metrics, strict=True)
        figures = [self._key(name, what) for name, metrics in names for what in ("loss", *metrics)]
        return list(dict.fromkeys(["loss", *figures]))

    def _share(self, task: Task, start: int, stop: int) -> range:
        """A task's own part of the samples [start, stop) of the longest held-out dataset."""
        size, longest = length(task.held_out) if task.held_out is not None else 0, self.validation_samples()
        return range(start * size // longest, stop * size // longest)

    def _held_out(
        self, model: nn.Module, k: int, task: Task, samples: range, device: torch.device
    ) -> dict[str, Tensor]:
        """(sum, weight) of the loss and of each metric, float64. Where there are no samples the model is called all the
        same, for ranks that need one another."""
        with self.author.answers("while its held-out dataset was read"):
            batch = collated(task.held_out, samples) if samples else collated(task.dataset, [0])
        batch = to_device(batch, device)
        figures: dict[str, Any] = {"loss": self.loss(model, Tagged(k, batch))}
        if task.metrics is not None:
            with self.author.answers("in its metrics"):
                figures |= task.metrics(model, to_device(batch, dtype=self._dtype))
                if set(figures) != {"loss", *self._counted.metrics[k]}:
                    raise ValueError(f"its metrics are {', '.join(figures)} of one batch, and others of another")
        return {
            name: torch.tensor(
                [torch.as_tensor(value).item() for value in pair] if samples else [0.0, 0.0], dtype=torch.float64
            )
            for name, pair in figures.items()
        }

    def validation_samples(self) -> int:
        """Size of the longest held-out dataset, 0 when there is none."""
        return max(length(task.held_out) if task.held_out is not None else 0 for task in self._tasks.values())

    def summary(self, totals: Averages) -> Averages:
        """Nothing beyond the losses."""
        return dict(totals)

    def documents(self, step: int, shard: Shard) -> list[str]:
        first, last = (step * self.global_batch + end for end in (shard.start, shard.stop))
        chosen = [(name, self._indices(k, first, last)) for k, name in enumerate(self._tasks)]
        several = len(chosen) > 1
        return [
            f"sample {index} of {name}" if several else f"sample {index}"
            for name, indices in chosen
            for index in indices
        ]

    def sample(self, model: nn.Module) -> Sequence[Artifact]:
        """What its author shows of it."""
        if self.parts.sample is None:
            return []
        with self.author.answers("when it was asked for a sample"):
            return self.parts.sample(model)

    def fingerprint(self) -> str:
        """Hash of the datasets' lengths and of a few of their samples."""
        digest = hashlib.sha256()
        for task in self._tasks.values():
            size = length(task.dataset)
            digest.update(str(size).encode())
            for index in np.linspace(0, size - 1, num=min(16, size), dtype=int):
                with self.author.answers(READING):
                    of_sample = tensors(collated(task.dataset, [int(index)]))
                for tensor in of_sample:
                    digest.update(tensor.detach().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def contents(self) -> dict[str, str]:
        """Hash of each dataset, of every phase (see `parts.content`)."""
        contents = {}
        for number, parts in enumerate((self.parts, *(phase.parts for phase in self.parts.phases)), 1):
            for name, task in tasks_of(parts).items():
                for which, dataset in (("dataset", task.dataset), ("held-out dataset", task.held_out)):
                    if dataset is not None:
                        of = "" if name == "main" else f" of task {name}"
                        phase = "" if number == 1 else f" of phase {number}"
                        with self.author.answers(READING):
                            contents[f"The {which}{of}{phase}"] = content(dataset)
        return contents

    def notes(self) -> list[str]:
        """None: a foreign dataset speaks for itself."""
        return []

    # --- phases and tasks ----------------------------------------------------------------------------------------

    def phases(self) -> Sequence[Phase]:
        """As its author says; phases that begin after the last step are left out."""
        assert self.recipe.train.steps is not None
        if self._phase is not None:
            return [self._phase]
        last = self.recipe.train.steps
        later = [phase for phase in self.parts.phases if phase.start < last]
        ends = [0, *(phase.start for phase in later), last]
        if any(begin >= end for begin, end in pairwise(ends)):
            raise UserError(
                f"model.build = {self.author.build!r}: its phases begin at steps {ends[1:-1]}.",
                why="each has to begin after the one before",
                do="give phases in the order of their first steps, above 0",
            )
        names = ["train" if not later else "phase 1", *(phase.name or f"phase {k}" for k, phase in enumerate(later, 2))]
        return [Phase(begin, end, name) for (begin, end), name in zip(pairwise(ends), names, strict=True)]

    def at(self, phase: Phase) -> ModuleWorkload:
        """With the model and the data of that phase."""
        if self._phase is not None or len(self.phases()) == 1:
            return self
        given = next((part for part in self.parts.phases if part.start == phase.start), None)
        parts = self.parts if given is None else checked(given.parts, self.author, has_data(self.parts))
        return ModuleWorkload(self.recipe, parts, self.author, phase, given.carry if given is not None else None)

    def carry(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._carried is None:
            return state
        with self.author.answers("when it carried the state over into the next phase"):
            carried: Mapping[str, Tensor] = self._carried(dict(state))
        return carried

    def tasks(self) -> Mapping[str, float]:
        return {name: task.weight for name, task in self._tasks.items()}

    # --- cost ----------------------------------------------------------------------------------------------------

    def work(self, micro_batch: Any, recompute: str, precision: str) -> Work:
        """Counted on one real forward pass: FLOPs by torch's counter, kept bytes by saved-tensor hooks."""
        counted = self._counted
        factor = micro_batch * VALUE_BYTES[precision] / 4
        return Work(
            products=(Product(rows=counted.flops / 2 * micro_batch, inner=1, columns=1),),
            attention=0.0,
            moved=counted.saved * 4 * factor,
            saved=counted.saved * factor,
            transient=0.0,
            again=0.0,
            samples=micro_batch,
            tokens=micro_batch,
        )


def open_module(recipe: Recipe, folder: str | Path | None = None, reads: bool = True) -> ModuleWorkload:
    """Imports and calls the function that `model.build` names, and tries its loss on two samples; without `reads`, no
    dataset is read that the function gives as a function, and nothing is tried.

    The module is looked for in `folder` (the recipe's), then in the current folder, then where Python looks. Raises
    UserError for whatever its code raises or does not give.
    """
    options = recipe.model
    assert isinstance(options, Options)
    made, author = function(options.build, folder)
    try:
        parts = made(**options.arguments)
    except EspalierError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, TypeError) and not author.place(error):  # the call itself did not fit
            raise UserError(
                f"model.build = {options.build!r} refused model.arguments: {error}.", do="correct model.arguments"
            ) from error
        if isinstance(error, FileNotFoundError):
            raise UserError(
                f"model.build = {options.build!r} reads a file that is not there: {error.filename}.",
                why=author.place(error),
                do="bring it back; or give the dataset as a function without arguments, which predictions and exports "
                "do not call (docs/module.md)",
            ) from error
        raise author.failure("when it was called", error) from error
    parts = checked(parts, author, reads)
    for later in parts.phases if reads else ():
        trial(checked(later.parts, author), author)
    return ModuleWorkload(recipe, parts, author)


# --- the table of kinds ------------------------------------------------------------------------------------------


class ModuleRow(Row, Freezes):
    """Modules of others."""

    def open(self, recipe: Recipe, opening: Opening) -> ModuleWorkload:
        """Calls the function that `model.build` names."""
        return open_module(recipe, opening.folder, opening.reads)

    def profile(self, recipe: Recipe, opened: Callable[[], ModuleWorkload]) -> Profile:
        """Of the module, as its `OWN_PLAN` cuts it where the recipe asks for that."""
        workload = opened()
        ranks = recipe.plan.pin.tp or 1
        if ranks == 1:
            return profile(workload)
        check_ranks(workload.parts.model, ranks)
        return replace(profile(workload, OWN_PLAN), tensor=ranks)

    def freeze(self, workload: ModuleWorkload, folder: Path) -> None:
        keep_sources(workload.author.build, folder)

    def suffices(self, frozen: Path, evaluation: bool) -> bool:
        """The code builds the model; a validation reads a dataset."""
        return not evaluation


ROW = ModuleRow()
