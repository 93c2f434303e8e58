"""From a recipe, a workload or a bare module to a planner's request. Counts on the meta device, allocates nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from espalier import units
from espalier.config import Gpt, Moe, Muon, Recipe, shapes
from espalier.cost import Anatomy, Cut, Product, Work
from espalier.errors import UserError
from espalier.graph.workload import GraphWorkload
from espalier.language import gpt, moe
from espalier.language import workload as language
from espalier.language.work import Setting
from espalier.module import ModuleWorkload
from espalier.optim.base import names_of
from espalier.plan.request import Request

if TYPE_CHECKING:
    from espalier.config import Pin


def of_recipe(recipe: Recipe) -> Request:
    """Of a resolved recipe for a decoder."""
    assert recipe.train.sequence is not None
    assert recipe.train.batch_tokens is not None
    assert isinstance(recipe.model, Gpt | Moe)
    sequence = recipe.train.sequence
    step = (recipe.train.batch_tokens // sequence, float(sequence))
    return _request(recipe, step, _language_tally(recipe.model), **_cuttable(recipe.model, sequence))


def of_workload(recipe: Recipe, workload: ModuleWorkload | GraphWorkload) -> Request:
    """Of a foreign module with its data, or of a graph."""
    model = workload.build(torch.device("cpu"), torch.float32)
    tally = _tally(model, workload.embeddings(model))
    known = {"remarks": workload.decisions()} if isinstance(workload, GraphWorkload) else {}
    return _request(recipe, (workload.global_batch, 1.0), tally, anatomy=workload.anatomy, layers=1, **known)


def of_module(model: torch.nn.Module, batch: int, precision: str, pin: Pin) -> Request:
    """Of a bare module in somebody's own loop: what it does with a sample is not known, so two operations per parameter
    are counted and no activations. Raises UserError when nothing in it is trainable."""
    tally = _tally(model, ())
    if not tally.trainable:
        raise UserError(f"{type(model).__name__} has no trainable parameter.", do="give the model that you train")

    layers = _layers(model)

    def anatomy(micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        zero = 0.0 * micro_batch
        nothing = Work((), zero, zero, zero, zero, zero, micro_batch, micro_batch)
        product = Product(micro_batch, tally.parameters / layers, 1)
        return Anatomy(layers, dataclasses.replace(nothing, products=(product,)), nothing)

    return Request(
        parameters=tally.parameters,
        trainable=tally.trainable,
        tensors=tally.tensors,
        layers=layers,
        global_batch=batch,
        tokens_per_sample=1.0,
        anatomy=anatomy,
        precision=precision,
        pin=pin,
    )


def _layers(model: torch.nn.Module) -> int:
    """The length of the longest list of modules: what is gathered at once when parameters are sharded."""
    lists = (torch.nn.ModuleList, torch.nn.Sequential)
    return max((len(one) for one in model.modules() if isinstance(one, lists)), default=1) or 1


def _request(recipe: Recipe, step: tuple[int, float], tally: _Tally, **known: Any) -> Request:
    train, options = recipe.train, recipe.plan
    for name in ("redundancy", "max_devices"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"plan.{name} = {value} is not possible.", do=f"plan.{name}=1 or more")
    is_muon = isinstance(train.optimizer, Muon)
    return Request(
        parameters=tally.parameters,
        trainable=tally.trainable,
        tensors=tally.tensors,
        global_batch=step[0],
        tokens_per_sample=step[1],
        optimizer="muon" if is_muon else "adamw",
        matrix_parameters=sum(rows * columns * n for (rows, columns), n in tally.matrices.items()) if is_muon else 0,
        matrix_shapes=tuple((rows, columns, count) for (rows, columns), count in sorted(tally.matrices.items())),
        precision=train.precision,
        compile=train.compile,
        recompute=recipe.plan.pin.recompute or train.recompute,
        pin=recipe.plan.pin,
        bucket_bytes=units.size(recipe.comm.bucket, "comm.bucket"),
        memory=None if options.memory is None else float(units.size(options.memory, "plan.memory")),
        redundancy=options.redundancy,
        max_devices=options.max_devices,
        codec=recipe.comm.codec,
        sync=recipe.sync,
        **known,
    )


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


def _cuttable(options: Gpt | Moe, sequence: int) -> dict[str, Any]:
    """What the planner knows of a decoder and where it can be cut."""
    size = shapes.sizes(options)

    def anatomy(micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        kind = moe if isinstance(options, Moe) else gpt
        return kind.work(Setting(size, sequence, micro_batch, recompute, precision, cut))

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
