"""A recipe made ready for the verbs: resolved, its data opened, its machines known, its plan chosen."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from espalier import cluster as clusters
from espalier import config, units
from espalier.config import Gpt, Moe, Muon, Recipe, derive, load, shapes
from espalier.cost import Anatomy, Cut
from espalier.errors import UserError
from espalier.hardware import probe
from espalier.language import gpt, hf, moe
from espalier.language import workload as language
from espalier.module import ModuleWorkload, open_module
from espalier.optim.base import names_of
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
    recipe = _with_initial(load.load(path, overrides))
    vocabulary = None
    if isinstance(recipe.model, Gpt | Moe) and recipe.data and recipe.model.vocabulary is None:
        with waiting("Reading the corpus") as progress:
            vocabulary = language.vocabulary(recipe.data, progress)
    resolved, derivations = derive.resolve(recipe, vocabulary=vocabulary)
    return Resolved(resolved, derivations, Path(path).absolute().parent)


def _with_initial(recipe: Recipe) -> Recipe:
    """Sizes that the recipe leaves open are those of the weights it starts from."""
    model = recipe.model
    if isinstance(model, config.Module) or model.initial is None:
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
    assert not isinstance(recipe.model, config.Module)
    return derive.parameter_count(recipe.model)


def request(
    resolved: Resolved, ranks: int | None = None, resident: int = 0, workload: Workload | None = None
) -> Request:
    """What the planner is asked; allocates nothing and opens no corpus (a foreign module it has to open)."""
    recipe, train = resolved.recipe, resolved.recipe.train
    if isinstance(recipe.model, config.Module):
        workload = workload or open_workload(resolved)
        assert isinstance(workload, ModuleWorkload)
        model = workload.build(torch.device("cpu"), torch.float32)
        batch, tokens = workload.global_batch, 1.0
        cuttable: dict[str, Any] = {"anatomy": workload.anatomy, "layers": 1}
        tally = _tally(model, workload.embeddings(model))
    else:
        assert train.sequence is not None
        assert train.batch_tokens is not None
        batch, tokens = train.batch_tokens // train.sequence, float(train.sequence)
        cuttable, tally = _cuttable(recipe), _language_tally(recipe.model)
    is_muon = isinstance(train.optimizer, Muon)
    return Request(
        parameters=tally.parameters,
        trainable=tally.trainable,
        tensors=tally.tensors,
        global_batch=batch,
        tokens_per_sample=tokens,
        optimizer="muon" if is_muon else "adamw",
        matrix_parameters=sum(rows * columns * n for (rows, columns), n in tally.matrices.items()) if is_muon else 0,
        matrix_shapes=tuple((rows, columns, count) for (rows, columns), count in sorted(tally.matrices.items())),
        precision=train.precision,
        compile=train.compile,
        recompute=recipe.plan.pin.recompute or train.recompute,
        pin=recipe.plan.pin if ranks is None else msgspec.structs.replace(recipe.plan.pin, ranks=ranks),
        bucket_bytes=units.size(recipe.comm.bucket, "comm.bucket"),
        resident=resident,
        **cuttable,
    )


def resident() -> int:
    """Bytes this process holds, which every rank forked from it begins with; in steps of 32 MiB, so that plans of equal
    processes are equal."""
    step = 32 * 2**20
    return -(-psutil.Process().memory_info().rss // step) * step


@dataclass(frozen=True)
class _Tally:
    """A model counted: parameters, trainable ones, their tensors, and hidden matrices by (rows, columns)."""

    parameters: int
    trainable: int
    tensors: int
    matrices: Counter[tuple[int, int]]

    def with_more(self, other: _Tally, times: int) -> _Tally:
        """This model grown `times` times by what `other` has beyond it."""
        return _Tally(
            self.parameters + times * (other.parameters - self.parameters),
            self.trainable + times * (other.trainable - self.trainable),
            self.tensors + times * (other.tensors - self.tensors),
            Counter({s: self.matrices[s] + times * (n - self.matrices[s]) for s, n in other.matrices.items()}),
        )


def _tally(model: torch.nn.Module, embeddings: Iterable[torch.nn.Parameter]) -> _Tally:
    trainable, outside = names_of(model), set(embeddings)
    matrices = (p for p in trainable if p.ndim == 2 and p not in outside)
    return _Tally(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(parameter.numel() for parameter in trainable),
        tensors=len(trainable),
        matrices=Counter((matrix.shape[0], matrix.shape[1]) for matrix in matrices),
    )


def _language_tally(options: Gpt | Moe) -> _Tally:
    """Of a decoder of any depth: its blocks are alike, so one and two of them are built, on the meta device."""
    models = [
        language.new_model(msgspec.structs.replace(options, depth=depth), 0, torch.device("meta")) for depth in (1, 2)
    ]
    one, two = (_tally(model, language.embeddings(model)) for model in models)
    return one.with_more(two, (options.depth or 1) - 1)


def _cuttable(recipe: Recipe) -> dict[str, Any]:
    """What the planner knows of a decoder and where it can be cut."""
    options, sequence = recipe.model, recipe.train.sequence
    assert isinstance(options, Gpt | Moe)
    size = shapes.sizes(options)

    def anatomy(micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        assert sequence is not None
        if isinstance(options, Moe):
            return moe.work(options, sequence, micro_batch, recompute, precision, cut)
        return gpt.work(options, sequence, micro_batch, recompute, precision, cut)

    tables = 1 if size.tied else 2
    return {
        "anatomy": anatomy,
        "layers": size.layers,
        "outside": tables * size.vocabulary * size.width + size.width,
        "tables": tables,
        "heads": size.heads,
        "kv_heads": size.kv_heads,
        "width": size.width,
        "kv_width": size.kv_width,
    }
