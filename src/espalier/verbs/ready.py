"""A recipe made ready for the verbs: resolved, its data opened, its machines known, its plan chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil

from espalier import cluster as clusters
from espalier import config
from espalier.config import GRAPH, Gpt, Moe, Recipe, derive, load
from espalier.errors import UserError
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.hardware import probe
from espalier.language import hf
from espalier.language import workload as language
from espalier.module import ModuleWorkload, open_module
from espalier.plan import asking
from espalier.plan.calibrate import DATASHEET, Calibration
from espalier.plan.request import Request
from espalier.track.progress import Waiting
from espalier.workload import Workload


@dataclass(frozen=True)
class Resolved:
    """A recipe with nothing left open, and why each derived value is what it is."""

    recipe: Recipe
    derivations: Sequence[derive.Derivation] = ()
    folder: Path | None = None
    """Where the recipe's file lies: a foreign module may lie beside it."""


def resolve(path: str | Path, overrides: Sequence[str]) -> Resolved:
    """Reads a recipe and derives what it leaves open."""
    return settle(load.load(path, overrides), Path(path).absolute().parent)


def settle(recipe: Recipe, folder: Path | None) -> Resolved:
    """Derives what a recipe leaves open; `folder`: where its file lies."""
    recipe = _with_initial(recipe)
    vocabulary = None
    if isinstance(recipe.model, Gpt | Moe) and recipe.data and recipe.model.vocabulary is None:
        with waiting("Reading the corpus") as progress:
            vocabulary = language.vocabulary(recipe.data, progress)
    resolved, derivations = derive.resolve(recipe, vocabulary=vocabulary)
    return Resolved(resolved, derivations, folder)


def _with_initial(recipe: Recipe) -> Recipe:
    """Sizes that the recipe leaves open are those of the weights it starts from."""
    model = recipe.model
    if not isinstance(model, Gpt | Moe) or model.initial is None:
        return recipe
    found = hf.options(Path(model.initial))
    if type(found) is not type(model):
        kind = "moe" if isinstance(found, Moe) else "gpt"
        raise UserError(f"model.initial = {model.initial!r} holds another kind of model.", do=f'model.kind = "{kind}"')
    plain = type(model)()
    given = {name: getattr(model, name) for name in model.__struct_fields__}
    kept = {name: value for name, value in given.items() if value != getattr(plain, name)}
    return msgspec.structs.replace(recipe, model=msgspec.structs.replace(found, **kept))


def open_workload(resolved: Resolved) -> Workload:
    """The workload of a resolved recipe, its data opened (built on first use, with a progress bar)."""
    recipe = resolved.recipe
    if isinstance(recipe.model, config.Module):
        return open_module(recipe, resolved.folder)
    if isinstance(recipe.model, GRAPH):
        with waiting("Reading the graph") as progress:
            return open_graph(recipe, resolved.folder, progress)
    with waiting("Reading the corpus") as progress:
        return language.open_language(recipe, progress=progress)


def machines(recipe: Recipe, cluster: str | None = None) -> clusters.Cluster:
    """The cluster file that was named, else this machine (probed once, then from the cache)."""
    named = cluster or recipe.plan.cluster
    if named is not None:
        return clusters.read(named)
    return probe.ready(say=say)


def say(text: str) -> None:
    """A line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows `what` on standard error once it has taken two seconds; called with (done, total)."""
    with Waiting(what, total=0, out=sys.stderr) as bar:

        def update(done: float, total: float) -> None:
            bar.total = total
            bar.advance(done - bar.done)

        yield update


def parameters(recipe: Recipe, workload: Workload) -> int:
    """How many parameters the recipe's model has."""
    if isinstance(workload, ModuleWorkload):
        return sum(parameter.numel() for parameter in workload.parts.model.parameters())
    if isinstance(workload, GraphWorkload):
        return sum(parameter.numel() for parameter in workload.bare().parameters())
    assert isinstance(recipe.model, Gpt | Moe)
    return derive.parameter_count(recipe.model)


def request(
    resolved: Resolved, ranks: int | None = None, resident: int = 0, workload: Workload | None = None
) -> Request:
    """What the planner is asked; allocates nothing and opens no corpus (a foreign module or a graph it has to open)."""
    recipe = resolved.recipe
    if isinstance(recipe.model, (config.Module, *GRAPH)):
        workload = workload or open_workload(resolved)
        assert isinstance(workload, ModuleWorkload | GraphWorkload)
        asked = asking.of_workload(recipe, workload)
    else:
        asked = asking.of_recipe(recipe)
    pin = asked.pin if ranks is None else msgspec.structs.replace(asked.pin, ranks=ranks)
    return replace(asked, pin=pin, resident=resident)


def calibration(recipe: Recipe, path: str | None = None) -> Calibration:
    """What measured runs say of the planner's coefficients: of `path`, else of `plan.calibration`, else nothing."""
    named = path or recipe.plan.calibration
    if named is None:
        return DATASHEET
    from espalier.verbs.measurements import calibrated

    return calibrated(named)


def resident() -> int:
    """Bytes this process holds, which every rank forked from it begins with; in steps of 32 MiB, so that plans of equal
    processes are equal."""
    step = 32 * 2**20
    return -(-psutil.Process().memory_info().rss // step) * step
