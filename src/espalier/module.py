"""Anybody's `nn.Module` as a workload: `[model] kind = "module", build = "package.module:function"`.

The function is called with `[model.arguments]` and returns `Parts`: a model, a dataset, a loss, and maybe a held-out
dataset. It must give the same model and data whenever it is called (seed what is random). Whatever its author's code
raises becomes a UserError that names the line.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from espalier.artifacts import Artifact
from espalier.config import Module as Options
from espalier.config import Recipe
from espalier.cost import Anatomy, Cut, Product, Work
from espalier.errors import EspalierError, UserError
from espalier.named import Author, function
from espalier.rows import Profile, Row, tally
from espalier.shard.blocks import blocks_of
from espalier.workload import Phase, Progress, Shard, Workload, to_device


class Parts(NamedTuple):
    """What `build` returns.

    `loss(model, batch)` gives (sum over the batch, weight), never a mean; a batch is what
    `torch.utils.data.default_collate` makes of the dataset's samples. `dataset` has `__len__` and `__getitem__`.
    `sample(model)` gives `espalier.artifacts` that the report shows: texts, images, tables.
    """

    model: nn.Module
    dataset: Dataset[Any]
    loss: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
    held_out: Dataset[Any] | None = None
    sample: Callable[[nn.Module], Sequence[Artifact]] | None = None


class ModuleWorkload:
    """The Protocol's answer for a foreign module. `train.batch_tokens` counts samples here."""

    whole_evaluation = False

    def __init__(self, recipe: Recipe, parts: Parts, author: Author) -> None:
        self.recipe = recipe
        self.parts = parts
        self.author = author
        self._counted = _trial(parts, author)
        self.size = _length(parts.dataset)
        self.global_batch = recipe.train.batch_tokens or min(32, self.size)
        self.nominal_weight = float(self.global_batch)
        self._dtype = torch.float32
        self._given = copy.deepcopy(parts.model.state_dict())

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The module as `build` gave it, every time anew."""
        model = self.parts.model
        model.load_state_dict(self._given)
        self._dtype = dtype
        return model.to(device=device, dtype=dtype)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The entries of its lists of layers, where it has any; else the module is one block."""
        return blocks_of(model) or [model]

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
                why=f"{self.author.build!r} builds a foreign module",
                do='train.recompute = "none", and call torch.utils.checkpoint inside the module',
            )

    def batches(self, step: int, shard: Shard) -> list[Any]:
        """Samples of a seeded permutation per epoch, collated."""
        indices = self._indices(step, shard)
        with self.author.answers(_READING):
            return [
                _collated(self.parts.dataset, indices[start - shard.start : stop - shard.start])
                for start, stop in shard.cuts
            ]

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
        with self.author.answers("in its loss"):
            return self.parts.loss(model, to_device(batch, dtype=self._dtype))

    def evaluate(self, model: nn.Module, shard: Shard) -> Mapping[str, tuple[float, float]]:
        """Loss on the held-out samples of `shard`."""
        total = weight = 0.0
        device = next(model.parameters()).device
        for start, stop in shard.cuts:
            with self.author.answers("while its held-out dataset was read"):
                batch = _collated(self.parts.held_out, range(start, stop))
            value, count = self.loss(model, to_device(batch, device))
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

    def sample(self, model: nn.Module) -> Sequence[Artifact]:
        """What its author shows of it."""
        if self.parts.sample is None:
            return []
        with self.author.answers("when it was asked for a sample"):
            return self.parts.sample(model)

    def fingerprint(self) -> str:
        """Hash of the dataset's length and of a few of its samples."""
        digest = hashlib.sha256(str(self.size).encode())
        for index in np.linspace(0, self.size - 1, num=min(16, self.size), dtype=int):
            with self.author.answers(_READING):
                tensors = _tensors(_collated(self.parts.dataset, [int(index)]))
            for tensor in tensors:
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
        counted = self._counted
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

    def anatomy(self, micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        """All of it is one layer: nobody knows where a foreign module can be cut."""
        nothing = Work((), 0.0, 0.0, 0.0, 0.0, 0.0, micro_batch, micro_batch)
        return Anatomy(1, self.work(micro_batch, recompute, precision), nothing)


class _Counted(NamedTuple):
    flops: float  # of one sample's forward pass
    kept: float  # bytes one sample keeps for backward, in fp32


_READING = "while its dataset was read"


def _trial(parts: Parts, author: Author) -> _Counted:
    """One batch of two samples through the loss: finds mistakes before a run begins, and counts."""
    if not any(parameter.requires_grad for parameter in parts.model.parameters()):
        raise UserError(f"model.build = {author.build!r} gave a model without a trainable parameter.")
    with author.answers(_READING):
        batch = _collated(parts.dataset, [0, 1 % _length(parts.dataset)])
        if parts.held_out is not None and _length(parts.held_out):
            _collated(parts.held_out, [0])
    with author.answers("in its loss, tried on two samples"), torch.random.fork_rng(devices=[]):
        found, counted = _count(parts, batch)
    if not _is_loss(found):
        raise UserError(
            f"model.build = {author.build!r}: its loss returned {_described(found)}.",
            why="it must return two tensors without dimensions, (sum over the batch, weight), the sum differentiable",
            do='reduction="sum", and torch.tensor(len(y)) for the weight; see docs/module.md',
        )
    return counted


def _count(parts: Parts, batch: Any) -> tuple[Any, _Counted]:
    from torch.utils.flop_counter import FlopCounterMode

    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in parts.model.parameters()}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    dtype = next(parameter.dtype for parameter in parts.model.parameters() if parameter.requires_grad)
    state = copy.deepcopy(parts.model.state_dict())
    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        found = parts.loss(parts.model, to_device(batch, dtype=dtype))
    parts.model.load_state_dict(state)  # a forward pass may have moved running statistics
    return found, _Counted(counter.get_total_flops() / 2, sum(kept.values()) / 2)


def _is_loss(found: Any) -> bool:
    if not (isinstance(found, tuple | list) and len(found) == 2):
        return False
    return all(isinstance(item, Tensor) and item.ndim == 0 for item in found) and bool(found[0].requires_grad)


def _described(found: Any) -> str:
    if isinstance(found, tuple | list):
        return f"({', '.join(_described(item) for item in found)})"
    if isinstance(found, Tensor):
        constant = "" if found.requires_grad or found.ndim else ", without gradient"
        return f"a tensor of shape {list(found.shape)}{constant}"
    return type(found).__name__


def open_module(recipe: Recipe, folder: str | Path | None = None) -> ModuleWorkload:
    """Imports and calls the function that `model.build` names, and tries its loss on two samples.

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
        raise author.failure("when it was called", error) from error
    return ModuleWorkload(recipe, _checked(parts, author), author)


def _checked(parts: Any, author: Author) -> Parts:
    if not (isinstance(parts, tuple) and 3 <= len(parts) <= len(Parts._fields) and isinstance(parts[0], nn.Module)):
        raise UserError(
            f"model.build = {author.build!r} returned {type(parts).__name__}.",
            why="it must return (model, dataset, loss) or (model, dataset, loss, held_out)",
            do="see docs/module.md",
        )
    parts = Parts(*parts)
    for dataset in (parts.dataset, parts.held_out):
        if dataset is not None and not hasattr(dataset, "__len__"):
            raise UserError(
                f"model.build = {author.build!r}: the dataset {type(dataset).__name__} has no length.",
                why="the global order of samples must be known to resume exactly",
                do="give a map-style torch Dataset (with __len__ and __getitem__)",
            )
        with author.answers("when a dataset was asked for its length"):
            size = 1 if dataset is None else _length(dataset)
        if size < 1 and dataset is parts.dataset:
            raise UserError(f"model.build = {author.build!r} gave an empty dataset.")
    return parts


def _collated(dataset: Any, indices: Sequence[int]) -> Any:
    return default_collate([dataset[index] for index in indices])


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else []
    return [tensor for item in items for tensor in _tensors(item)]


def _length(dataset: Any) -> int:
    return len(dataset)


# --- the table of kinds ------------------------------------------------------------------------------------------


def _open(recipe: Recipe, folder: Path | None, progress: Progress, data: Any) -> ModuleWorkload:
    return open_module(recipe, folder)


def _profile(recipe: Recipe, opened: Callable[[], Workload]) -> Profile:
    workload = opened()
    assert isinstance(workload, ModuleWorkload)
    model = workload.build(torch.device("cpu"), torch.float32)
    return Profile(
        tally=tally(model, workload.embeddings(model)),
        global_batch=workload.global_batch,
        tokens_per_sample=1.0,
        anatomy=workload.anatomy,
    )


ROW = Row(open=_open, profile=_profile)
