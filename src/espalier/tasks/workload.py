"""Several tasks on several towers as a workload: `[model] kind = "multitask"` with `[[towers]]` and `[[tasks]]`.

A step has one micro-batch of each task. Its loss is the sum of the tasks' losses, each times its weight, divided by the
samples of all. To the planner a step is one sample: what is divided over ranks are the parts of the tasks, in waves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.module.parts import Parts, Task, collated, length, tasks_of
from espalier.module.workload import ModuleWorkload
from espalier.parallel.workload import Averages, Shard, SummedLoss, Tagged, to_device
from espalier.radiance.workload import psnr
from espalier.recipe import Recipe
from espalier.recipe.cost import PartCost, Product, Profile, Work
from espalier.recipe.import_function import Author
from espalier.recipe.multitask import with_inputs
from espalier.tasks import answers, sources
from espalier.tasks import tower_cost as costs
from espalier.tasks.towers import Figures, MultitaskModel, Shapes, TowerModule
from espalier.train.workload_row import Answer, Opening, Predicts, Row, Sampling
from espalier.train.wrap_policy import profile


class MultitaskWorkload(ModuleWorkload):
    """See above. `train.batch_tokens` says nothing here: each task has its own batch."""

    def __init__(self, recipe: Recipe, parts: Parts, author: Author) -> None:
        super().__init__(recipe, parts, author)
        self.batch = [task.batch for task in recipe.tasks or ()]
        self.global_batch = 1
        self._parts: dict[bool, tuple[PartCost, ...]] = {}
        self.nominal_weight = float(sum(self.batch))

    def build(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The towers with their initial weights: a copy, as a rank may free parts of it."""
        self._dtype = dtype
        return copy.deepcopy(self.parts.model).to(device=device, dtype=dtype)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of all towers that are here."""
        return [block for tower in model.modules() if isinstance(tower, TowerModule) for block in tower.blocks]

    def batches(self, step: int, shard: Shard) -> list[Any]:
        """One micro-batch of each task."""
        if shard.stop <= shard.start:
            return []
        with self.author.answers("while its dataset was read"):
            return [Tagged(k, collated(task.dataset, self._of_step(k, step))) for k, task in self._numbered()]

    def notes(self) -> list[str]:
        """What the data of each task has that is not used."""
        tasks = tasks_of(self.parts).items()
        return [f"{name}: {note}" for name, task in tasks for note in sources.notes(task.dataset)]

    def _of_step(self, task: int, step: int) -> list[int]:
        """A micro-batch: samples of a seeded permutation per epoch."""
        return self._indices(task, step * self.batch[task], (step + 1) * self.batch[task])

    def documents(self, step: int, shard: Shard) -> list[str]:
        return [f"sample {sample} of {name}" for k, name in enumerate(self._tasks) for sample in self._of_step(k, step)]

    def parts_of(self, measures: bool) -> tuple[PartCost, ...]:
        """What each part of each task costs; `measures`: in seconds too. Asked once: measurements differ."""
        if measures not in self._parts:
            model = self.build(torch.device("cpu"), torch.float32)
            fields = [to_device(batch.batch, dtype=torch.float32) for batch in self.batches(0, Shard(0, 1, 1))]
            self._parts[measures] = costs.parts(model, fields, measures)
        return self._parts[measures]

    def figures(self, model: nn.Module, batch: Tagged) -> Figures:
        """The figures of a task's micro-batch."""
        return model(batch.task, to_device(batch.batch, dtype=self._dtype))

    def loss(self, model: nn.Module, batch: Any) -> SummedLoss:
        return self.figures(model, batch)["loss"]

    def _held_out(
        self, model: nn.Module, k: int, task: Task, samples: range, device: torch.device
    ) -> dict[str, Tensor]:
        """(sum, weight) of each figure, from one forward pass for each of the task's batches."""
        sums = {name: torch.zeros(2, dtype=torch.float64) for name in ("loss", *self._counted.metrics[k])}
        size = self.batch[k]
        for first in range(0, len(samples), size):
            batch = to_device(collated(task.held_out, samples[first : first + size]), device)
            for name, pair in self.figures(model, Tagged(k, batch)).items():
                sums[name] += torch.tensor([float(value) for value in pair], dtype=torch.float64)
        return sums

    def summary(self, totals: Averages) -> Averages:
        """Errors of colours as peak signal-to-noise ratios, in decibels."""
        named = ((name.removesuffix("error"), name, value) for name, value in totals.items())
        return {f"{of}psnr" if of != name else name: psnr(value) if of != name else value for of, name, value in named}

    def _share(self, task: Task, start: int, stop: int) -> range:
        """All held-out samples: nobody else has any."""
        return range(length(task.held_out) if task.held_out is not None else 0)

    def validation_samples(self) -> int:
        """A validation is one, as a step is."""
        return 1

    def work(self, micro_batch: Any, recompute: str, precision: str) -> Work:
        whole = super().work(micro_batch * max(self.batch), recompute, precision)
        return Work(
            products=tuple(Product(product.rows, 1, 1) for product in whole.products),
            attention=0.0,
            moved=whole.moved,
            saved=whole.saved,
            transient=0.0,
            again=0.0,
            samples=micro_batch,
            tokens=micro_batch * sum(self.batch),
        )


def _loss(task: int, model: nn.Module, fields: Any) -> SummedLoss:
    return model(task, fields)["loss"]


def _metrics(task: int, model: nn.Module, fields: Any) -> dict[str, SummedLoss]:
    return {name: pair for name, pair in model(task, fields).items() if name != "loss"}


def open_multitask(recipe: Recipe, folder: Path | None = None) -> MultitaskWorkload:
    """Reads the tasks' data and builds the towers. Raises UserError for what does not fit together."""
    options = recipe.tasks or ()
    towers = recipe.towers or ()
    kinds = {tower.name: tower.kind for tower in towers}
    tasks = {}
    shape: dict[str, tuple[int, ...]] = {}
    classes = {}
    fields = {}
    for k, task in enumerate(options):
        dataset, held_out = sources.load(task, recipe, folder)
        sample = dataset[0]
        sources.check_fields(task, [kinds[name] for name in with_inputs(task.towers, list(towers))], sample)
        shape |= {name: tuple(value.shape) for name, value in sample.items()}
        if task.loss == "classes":
            classes[task.name] = 1 + max(int(dataset[index]["label"]) for index in range(length(dataset)))
        if isinstance(dataset, sources.SceneRays):
            fields[task.towers[0]] = dataset.scene
        metrics = None if task.loss == "next_token" else partial(_metrics, k)
        tasks[task.name] = Task(dataset, partial(_loss, k), held_out, task.weight, metrics)
    text, image, nodes = (shape.get(name) for name in ("text", "image", "nodes"))
    shapes = Shapes(
        length=text[0] if text else 1,
        side=image[-1] if image else 28,
        channels=image[0] if image else 1,
        columns=nodes[-1] if nodes else 1,
        classes=classes,
        scenes=fields,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        model = MultitaskModel(recipe, shapes)
    return MultitaskWorkload(recipe, Parts(model, tasks=tasks), Author("tasks", ""))


# --- the table of kinds --------------------------------------------------------------------------------------------


class TasksRow(Row, Predicts):
    """Several tasks on several towers."""

    reading = "Reading the data of all tasks"

    def open(self, recipe: Recipe, opening: Opening) -> MultitaskWorkload:
        return open_multitask(recipe, opening.folder)

    def profile(self, recipe: Recipe, opened: Callable[[], MultitaskWorkload]) -> Profile:
        """Of the towers, with the cost of each part."""
        workload = opened()
        parts = workload.parts_of(recipe.plan.trial)
        return replace(
            profile(workload),
            facts={"task_waves": parts} if parts else {},
            tokens_per_sample=float(sum(workload.batch)),
        )

    def answer(
        self, workload: MultitaskWorkload, model: MultitaskModel, text: str | None, sampling: Sampling
    ) -> Answer:
        """Of the task that `text` names."""
        return answers.answer(workload.parts.tasks or {}, workload.batch, model, text, sampling)

    def usage(self, recipe: Mapping[str, Any]) -> tuple[str, str]:
        return "answers", f" {recipe['tasks'][0]['name']}"


ROW = TasksRow()
