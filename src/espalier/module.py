"""Anybody's `nn.Module` as a workload: `[model] kind = "module", build = "package.module:function"`.

The function is called with `[model.arguments]` and returns `Parts`: a model, a dataset, a loss, and maybe a held-out
dataset. It runs on every rank and must give the same model and data on each (seed what is random).
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from espalier.config import Module as Options
from espalier.config import Recipe
from espalier.cost import Product, Work
from espalier.errors import UserError
from espalier.workload import Phase, Shard, to_device


class Parts(NamedTuple):
    """What `build` returns.

    `loss(model, batch)` gives (sum over the batch, weight), never a mean; a batch is what
    `torch.utils.data.default_collate` makes of the dataset's samples. `dataset` has `__len__` and `__getitem__`.
    """

    model: nn.Module
    dataset: Dataset[Any]
    loss: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
    held_out: Dataset[Any] | None = None


class ModuleWorkload:
    """The Protocol's answer for a foreign module. `train.batch_tokens` counts samples here."""

    def __init__(self, recipe: Recipe, parts: Parts) -> None:
        self.recipe = recipe
        self.parts = parts
        self.size = _length(parts.dataset)
        self.global_batch = recipe.train.batch_tokens or min(32, self.size)
        self.nominal_weight = float(self.global_batch)
        self._dtype = torch.float32
        self._given = {name: value.clone() for name, value in parts.model.state_dict().items()}

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The module as `build` gave it, every time anew."""
        model = self.parts.model
        model.load_state_dict(self._given)
        self._dtype = dtype
        return model.to(device=device, dtype=dtype)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The module as one block: nothing is known of its inside."""
        return [model]

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
                f"train.recompute = {mode!r} needs to know the model's blocks.",
                why=f"{self.recipe.model.build!r} builds a foreign module"
                if isinstance(self.recipe.model, Options)
                else "",
                do='train.recompute = "none", and call torch.utils.checkpoint inside the module',
            )

    def batches(self, step: int, shard: Shard) -> list[Any]:
        """Samples of a seeded permutation per epoch, collated."""
        indices = self._indices(step, shard)
        dataset: Any = self.parts.dataset
        cuts = range(0, len(indices), shard.micro_batch)
        return [default_collate([dataset[i] for i in indices[at : at + shard.micro_batch]]) for at in cuts]

    def _indices(self, step: int, shard: Shard) -> list[int]:
        found = []
        for number in range(step * self.global_batch + shard.start, step * self.global_batch + shard.stop):
            epoch, place = divmod(number, self.size)
            found.append(int(self._permutation(epoch)[place]))
        return found

    def _permutation(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.recipe.train.seed, epoch]).permutation(self.size)
        return self._order

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The module's own loss; floating inputs take the precision of the run."""
        return self.parts.loss(model, to_device(batch, dtype=self._dtype))

    def evaluate(self, model: nn.Module, shard: Shard) -> Mapping[str, tuple[float, float]]:
        """Loss on the held-out samples of `shard`."""
        total = weight = 0.0
        held_out: Any = self.parts.held_out
        device = next(model.parameters()).device
        for at in range(shard.start, shard.stop, shard.micro_batch):
            samples = [held_out[i] for i in range(at, min(at + shard.micro_batch, shard.stop))]
            value, count = self.loss(model, to_device(default_collate(samples), device))
            total += float(value)
            weight += float(count)
        return {"loss": (total, weight)}

    def validation_samples(self) -> int:
        """Size of the held-out dataset, 0 when there is none."""
        return _length(self.parts.held_out) if self.parts.held_out is not None else 0

    def summary(self, totals: Mapping[str, float]) -> Mapping[str, float]:
        """Nothing beyond the loss."""
        return dict(totals)

    def documents(self, step: int, shard: Shard) -> list[str]:
        """The samples' indices."""
        return [f"sample {index}" for index in self._indices(step, shard)]

    def sample(self, model: nn.Module) -> str:
        """Nothing to show."""
        return ""

    def fingerprint(self) -> str:
        """Hash of the dataset's length and of a few of its samples."""
        digest = hashlib.sha256(str(self.size).encode())
        dataset: Any = self.parts.dataset
        for index in np.linspace(0, self.size - 1, num=min(16, self.size), dtype=int):
            for tensor in _tensors(default_collate([dataset[int(index)]])):
                digest.update(tensor.detach().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def notes(self) -> list[str]:
        """None: a foreign dataset speaks for itself."""
        return []

    def phases(self) -> Sequence[Phase]:
        """One."""
        assert self.recipe.train.steps is not None
        return [Phase(0, self.recipe.train.steps)]

    def tasks(self) -> Sequence[str]:
        """One."""
        return ["main"]

    def work(self, micro_batch: Any, recompute: str, precision: str) -> Work:
        """Counted on one real forward pass: FLOPs by torch's counter, kept bytes by saved-tensor hooks."""
        counted = self._counted()
        factor = micro_batch * {"bf16": 0.5, "fp64": 2.0}.get(precision, 1.0)
        return Work(
            products=(Product(rows=counted.flops / 2 * micro_batch, inner=1, columns=1),),
            attention=0.0,
            moved=counted.kept * 4 * factor,
            kept=counted.kept * factor,
            transient=0.0,
            again=0.0,
            samples=micro_batch,
            tokens=micro_batch,
        )

    def _counted(self) -> _Counted:
        if not hasattr(self, "_count"):
            self._count = _count(self.parts)
        return self._count


class _Counted(NamedTuple):
    flops: float  # of one sample's forward pass
    kept: float  # bytes one sample keeps for backward, in fp32


def _count(parts: Parts) -> _Counted:
    from torch.utils.flop_counter import FlopCounterMode

    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in parts.model.parameters()}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    dataset: Any = parts.dataset
    batch = default_collate([dataset[0], dataset[1 % _length(parts.dataset)]])
    state = {name: value.clone() for name, value in parts.model.state_dict().items()}
    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        value, _ = parts.loss(parts.model, batch)
    parts.model.load_state_dict(state)  # a forward pass may have moved running statistics
    del value
    return _Counted(counter.get_total_flops() / 2, sum(kept.values()) / 2)


def open_module(recipe: Recipe) -> ModuleWorkload:
    """Imports and calls the function that `model.build` names. Raises UserError when that fails."""
    options = recipe.model
    assert isinstance(options, Options)
    function = _import(options.build)
    try:
        parts = function(**options.arguments)
    except TypeError as error:
        raise UserError(f"model.build = {options.build!r} refused model.arguments: {error}.") from error
    if not (isinstance(parts, tuple) and len(parts) in (3, 4) and isinstance(parts[0], nn.Module)):
        raise UserError(
            f"model.build = {options.build!r} returned {type(parts).__name__}.",
            why="it must return (model, dataset, loss) or (model, dataset, loss, held_out)",
            do="see docs/module.md",
        )
    parts = Parts(*parts)
    if _length(parts.dataset) < 1:
        raise UserError(f"model.build = {options.build!r} gave an empty dataset.")
    return ModuleWorkload(recipe, parts)


def _import(text: str) -> Callable[..., Any]:
    name, colon, attribute = text.partition(":")
    if not colon or not name or not attribute:
        raise UserError(f"model.build = {text!r} names no function.", do='model.build = "package.module:function"')
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(name), attribute)
    except ImportError as error:
        raise UserError(
            f"model.build = {text!r}: {error}.", do="install the module or run from the folder that holds it"
        ) from error
    except AttributeError:
        raise UserError(f"model.build = {text!r}: {name} has no {attribute!r}.") from None
    if not callable(found):
        raise UserError(f"model.build = {text!r} is not a function.")
    return found


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else []
    return [tensor for item in items for tensor in _tensors(item)]


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise UserError(
            f"The dataset {type(dataset).__name__} has no length.",
            why="the global order of samples must be known to resume exactly",
            do="give a map-style torch Dataset (with __len__ and __getitem__)",
        ) from None
