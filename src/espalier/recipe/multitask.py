"""Several tasks and towers: their options, what recipes leave open of them, and what they refuse. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from espalier.recipe.base import Draft, Kind, Model, RecipeBase
from espalier.recipe.errors import UserError, nearest
from espalier.recipe.sections import TaskOptions, Tower


class Multitask(Model, frozen=True, tag="multitask"):
    """Several `[[tasks]]` on several `[[towers]]`, trained together.

    `length`: characters of a text; `joint`: width in which towers of a contrastive task are compared.
    """

    length: int = 64
    joint: int = 64


LOSSES = {"contrastive": 2, "next_token": 1, "classes": 1, "colours": 1}
"""Towers whose outputs each loss takes."""
LAYERS = 2
"""Hidden layers of the colours of a field."""
CELLS = 8, 512
"""Of a side of a field, at least and at most."""


def with_inputs(names: Sequence[str], towers: Sequence[Tower]) -> list[str]:
    """Towers in the order in which they run: those that others take first. Raises UserError for a cycle."""
    by_name, inputs = {tower.name: tower for tower in towers}, list[str]()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circle = " takes ".join([*path[path.index(name) :], name])
            raise UserError(
                f"Towers form a cycle: {circle}.",
                why="a tower runs when those that it takes have run",
                do=f"leave {name!r} out of `takes` of {path[-1]!r}",
            )
        for other in by_name[name].takes:
            visit(other, (*path, name))
        if name not in inputs:
            inputs.append(name)

    for name in names:
        visit(name, ())
    return inputs


def _check(recipe: RecipeBase) -> None:
    """Raises UserError for tasks and towers that cannot be trained."""
    tasks, towers = recipe.tasks or (), recipe.towers or ()
    if not tasks or not towers:
        missing = "[[tasks]]" if not tasks else "[[towers]]"
        raise UserError(f"A recipe of several tasks has no {missing}.", do="see examples/tasks.toml")
    for word, names in (("tasks", [task.name for task in tasks]), ("towers", [tower.name for tower in towers])):
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise UserError(f"Two {word} are called {twice[0]!r}.", do="another name for one of them")
        odd = [name for name in names if not name.replace("-", "_").isidentifier()]
        if odd:
            raise UserError(f"{word}.name = {odd[0]!r} is not possible.", do="a word of letters, digits, - and _")
    known = [tower.name for tower in towers]
    for tower in towers:
        if tower.width < 8 or tower.width % 8 or tower.depth < 1:
            raise UserError(
                f"The tower {tower.name!r} has width {tower.width} and depth {tower.depth}.",
                do="a multiple of 8 for its width, and a depth of 1 or more",
            )
        if tower.takes and tower.kind in ("graph", "voxels"):
            whose = "a graph's" if tower.kind == "graph" else "a scene's"
            raise UserError(
                f"The tower {tower.name!r} is {whose} and takes {tower.takes[0]!r}.", do="leave `takes` out"
            )
        _known(tower.takes, known, f"The tower {tower.name!r} takes")
    with_inputs(known, towers)
    used = {name for task in tasks for name in _towers_of(task, towers, known)}
    _check_fields(recipe, tasks, towers)
    unused = [name for name in known if name not in used]
    if unused:
        raise UserError(f"No task uses the tower {unused[0]!r}.", do="name it in a task, or leave it out")


def _towers_of(task: TaskOptions, towers: Sequence[Tower], known: list[str]) -> list[str]:
    """The towers that a task runs. Raises UserError where the task is none."""
    who = f"The task {task.name!r}"
    if not task.data.strip():
        raise UserError(f"{who} has no data.", do='data = "python:stdlib", or another source (docs/tasks.md)')
    if not (math.isfinite(task.weight) and task.weight > 0):
        raise UserError(
            f"{who} has weight {task.weight:g}.", why="it would change nothing", do="a weight above 0, or no such task"
        )
    if task.batch < 1 or (task.loss == "contrastive" and task.batch < 2):
        raise UserError(f"{who} has a batch of {task.batch}.", do="batch = 2 or more")
    _known(task.towers, known, f"{who} uses")
    wanted = LOSSES[task.loss]
    if len(task.towers) != wanted:
        raise UserError(
            f"{who} names {len(task.towers)} towers.",
            why=f'loss = "{task.loss}" takes the outputs of {wanted}',
            do="towers that feed others stand in `takes` of these",
        )
    kinds = {tower.name: tower.kind for tower in towers}
    if task.loss == "next_token" and kinds[task.towers[0]] != "text":
        raise UserError(f"{who} predicts text from the tower {task.towers[0]!r}, which reads none.", do="a text tower")
    return with_inputs(task.towers, towers)


def _check_fields(recipe: RecipeBase, tasks: Sequence[TaskOptions], towers: Sequence[Tower]) -> None:
    """Raises UserError for radiance fields that cannot be trained, or for what is none."""
    fields = {tower.name: tower for tower in towers if tower.kind == "voxels"}
    for field in fields.values():
        if field.depth != LAYERS:
            raise UserError(
                f"The field {field.name!r} has depth {field.depth}.",
                why=f"the network of its colours has {LAYERS} layers",
                do="leave `depth` out; `resolution` and `width` make it larger",
            )
        if not CELLS[0] <= field.resolution <= CELLS[1]:
            raise UserError(
                f"The field {field.name!r} has resolution {field.resolution}.", do="from 8 to 512; 64 is usual"
            )
        users = [task.name for task in tasks if field.name in task.towers]
        if len(users) > 1:
            raise UserError(
                f"The tasks {' and '.join(users)} share the field {field.name!r}.",
                why="a field is one scene's",
                do="a field for each",
            )
        others = [other.name for other in towers if field.name in other.takes]
        if others:
            raise UserError(f"The tower {others[0]!r} takes the field {field.name!r}.", do="leave it out of `takes`")
    for task in tasks:
        if (task.loss == "colours") != any(name in fields for name in task.towers):
            raise UserError(
                f"The task {task.name!r} has loss = {task.loss!r} and the tower {task.towers[0]!r}.",
                why='the colours of a scene are what a tower of kind = "voxels" gives, and nothing else is',
                do='loss = "colours" with a tower of kind = "voxels"',
            )
    if fields and recipe.train.precision not in ("auto", "fp32", "fp64"):
        raise UserError(
            f"train.precision = {recipe.train.precision!r} is not possible with a field.",
            why="compositing is computed in single precision",
            do='train.precision = "fp32"',
        )


def _known(names: Sequence[str], known: Sequence[str], what: str) -> None:
    for name in names:
        if name not in known:
            near = nearest(name, known)
            raise UserError(
                f"{what} {name!r}, and no tower is called so.",
                do=f"did you mean {near!r}?" if near else f"one of {', '.join(known)}",
            )


def _fill(draft: Draft) -> None:
    samples = sum(task.batch for task in draft.recipe.tasks or ())
    draft.fill("train.sequence", 1, "a sample of any task counts as one token")
    draft.fill("train.batch_tokens", max(1, samples), "the batches of all tasks")
    draft.fill("train.steps", 1000, "nothing is known of the tasks: a thousand steps")
    draft.rates(1e-3, "a usual rate for small transformers")


def _usual(table: dict[str, object]) -> dict[str, object]:
    """AdamW, as towers differ too much for one setting of Muon; single precision where one is a field. Raises UserError
    for a field that is to be trained in two stages."""
    train, towers = table.get("train", {}), table.get("towers", [])
    rows = [row for row in towers if isinstance(row, dict)] if isinstance(towers, list) else []
    fields = [tower for tower in rows if tower.get("kind") == "voxels"]
    for field in fields:
        if "coarse" in field:
            raise UserError(
                f"The field {field.get('name', '')!r} has `coarse`, and is trained in one stage.",
                why="between two stages a field changes its shape, and the tasks beside it would be planned anew then",
                do='leave `coarse` out; a scene alone (model.kind = "voxels") is trained in two',
            )
    usual = {"optimizer": "adamw"} | ({"precision": "fp32"} if fields else {})
    return table if not isinstance(train, dict) else {**table, "train": {**usual, **train}}


KIND = Kind(
    name="several tasks",
    options=(Multitask,),
    row="espalier.tasks",
    fill=_fill,
    check=_check,
    sections=("tasks", "towers"),
    usual=_usual,
)

__all__ = ["KIND", "Multitask", "with_inputs"]
