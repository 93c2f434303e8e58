"""What the function that `model.build` names returns, checked and tried before a run begins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.random import fork_rng
from torch.utils.data import Dataset, TensorDataset, default_collate

from espalier.kernels.counts import Counter
from espalier.parallel.workload import Pieces, SummedLoss, to_device
from espalier.recipe.errors import UserError
from espalier.recipe.import_function import Author
from espalier.store.artifacts import Artifact

Loss = Callable[[nn.Module, Any], SummedLoss]
"""`loss(model, batch)` gives (sum over the batch, weight), never a mean."""

Metrics = Callable[[nn.Module, Any], Mapping[str, tuple[Tensor | float, Tensor | float]]]
"""`metrics(model, batch)` gives (sum over the batch, weight) of each of a task's own figures, by name."""
RESERVED = "loss", "step", "time", "seconds"
"""What a metric cannot be called, nor `test_…`: validations have these."""

Given = Dataset[Any] | Callable[[], Dataset[Any]] | None
"""A dataset, or a function that gives it, called where a run trains or is evaluated; predictions do not need it."""


class Task(NamedTuple):
    """One of several tasks of a model: its data, and how much its losses count in the sum."""

    dataset: Given
    loss: Loss
    held_out: Given = None
    weight: float = 1.0
    metrics: Metrics | None = None


class Parts(NamedTuple):
    """What `build` returns.

    A batch is what `torch.utils.data.default_collate` makes of the dataset's samples. `dataset` has `__len__` and
    `__getitem__`, or is a function that gives such a one. `sample(model)` gives `espalier.store.artifacts` that
    the report
    shows: texts, images, tables. `tasks`
    stand in place of dataset, loss and held-out data where there are several; `phases` follow the first.
    `pieces(model)` says how a model that is no `nn.Sequential` may be cut into pipeline stages
    (`espalier.parallel.workload.Pieces`). `metrics(model, batch)` gives figures of held-out batches beside their loss.
    """

    model: nn.Module
    dataset: Given = None
    loss: Loss | None = None
    held_out: Given = None
    sample: Callable[[nn.Module], Sequence[Artifact]] | None = None
    tasks: Mapping[str, Task] | None = None
    phases: Sequence[Later] = ()
    pieces: Callable[[nn.Module], Pieces] | None = None
    metrics: Metrics | None = None


class Later(NamedTuple):
    """What is trained from step `start` on. `carry` makes of the state before (name -> tensor) what this model begins
    with, where shapes differ; None: what has its shape still is kept, the rest is as built."""

    start: int
    parts: Parts
    carry: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None
    name: str = ""


def tasks_of(parts: Parts) -> dict[str, Task]:
    """The tasks by name; what has one only calls it `main`."""
    if parts.tasks:
        return dict(parts.tasks)
    assert parts.loss is not None
    return {"main": Task(parts.dataset, parts.loss, parts.held_out, metrics=parts.metrics)}


# --- checks ------------------------------------------------------------------------------------------------------


def has_data(parts: Parts) -> bool:
    """Whether its datasets were read."""
    return all(task.dataset is not None for task in tasks_of(parts).values())


_WithData = TypeVar("_WithData", Parts, Task)


def _given(dataset: Any, reads: bool) -> Any:
    if not reads or dataset is None:
        return None
    return dataset() if callable(dataset) and not hasattr(dataset, "__getitem__") else dataset


def _read(parts: Parts, author: Author, reads: bool) -> Parts:
    """With the datasets that functions give, or without `reads` none."""

    def read(part: _WithData) -> _WithData:
        return part._replace(dataset=_given(part.dataset, reads), held_out=_given(part.held_out, reads))

    with author.answers(READING):
        if not parts.tasks:
            return read(parts)
        return parts._replace(tasks={name: read(task) for name, task in parts.tasks.items()})


def checked(parts: Any, author: Author, reads: bool = True) -> Parts:
    """`parts` as `Parts`, its datasets read or left out. Raises UserError for what a module cannot be trained from."""
    known = isinstance(parts, tuple) and 1 <= len(parts) <= len(Parts._fields) and isinstance(parts[0], nn.Module)
    parts = Parts(*parts) if known else parts
    if not known or (not parts.tasks and (parts.dataset is None or parts.loss is None)):
        raise UserError(
            f"model.build = {author.build!r} returned {type(parts).__name__}.",
            why="it must return (model, dataset, loss) or (model, dataset, loss, held_out)",
            do="see docs/module.md",
        )
    parts = _read(parts, author, reads)
    for name, task in tasks_of(parts).items():
        _check_task(name, task, author)
    return parts


def _check_task(name: str, task: Task, author: Author) -> None:
    if not task.weight > 0:
        raise UserError(
            f"model.build = {author.build!r}: task {name!r} has weight {task.weight}.", do="a weight above 0"
        )
    for dataset in (task.dataset, task.held_out):
        if dataset is not None and not hasattr(dataset, "__len__"):
            raise UserError(
                f"model.build = {author.build!r}: the dataset {type(dataset).__name__} has no length.",
                why="the global order of samples must be known to resume exactly",
                do="give a map-style torch Dataset (with __len__ and __getitem__)",
            )
        with author.answers("when a dataset was asked for its length"):
            size = 1 if dataset is None else length(dataset)
        if size < 1 and dataset is task.dataset and dataset is not None:
            raise UserError(f"model.build = {author.build!r} gave an empty dataset.")


READING = "while its dataset was read"


class Counted(NamedTuple):
    """What a forward pass asks for, of one sample of each task together."""

    flops: float
    saved: float
    """Bytes kept for backward, in fp32."""
    metrics: tuple[tuple[str, ...], ...] = ()
    """Names of each task's metrics."""


def trial(parts: Parts, author: Author) -> Counted:
    """One batch of two samples of each task through its loss: finds mistakes before a run begins, and counts."""
    if not any(parameter.requires_grad for parameter in parts.model.parameters()):
        raise UserError(f"model.build = {author.build!r} gave a model without a trainable parameter.")
    counted = [_tried(parts.model, task, author) for task in tasks_of(parts).values()]
    metrics = tuple(name for part in counted for name in part.metrics)
    return Counted(sum(part.flops for part in counted), sum(part.saved for part in counted), metrics)


def _tried(model: nn.Module, task: Task, author: Author) -> Counted:
    with author.answers(READING):
        batch = collated(task.dataset, [0, 1 % length(task.dataset)])
        if task.held_out is not None and length(task.held_out):
            collated(task.held_out, [0])
        twice = collated(task.dataset, [0, 1 % length(task.dataset)] * 2)
    with author.answers("in its loss, tried on two samples"), fork_rng(devices=[]):
        loss, counted = _count(model, task.loss, batch)
    if not _is_loss(loss):
        raise UserError(
            f"model.build = {author.build!r}: its loss returned {_described(loss)}.",
            why="it must return two tensors without dimensions, (sum over the batch, weight), the sum differentiable",
            do='reduction="sum", and torch.tensor(len(y)) for the weight; see docs/module.md',
        )
    with author.answers("in its loss, tried on two samples twice"), fork_rng(devices=[]), torch.no_grad():
        again = _called(model, task.loss, twice)
    single, two = float(loss[0].detach()), float(again[0])
    if single and abs(two - single) <= 1e-3 * abs(single):
        raise UserError(
            f"model.build = {author.build!r}: its loss is {single:.4g} for two samples, {two:.4g} for both twice.",
            why="a mean does not add up over micro-batches and ranks",
            do='reduction="sum", and torch.tensor(len(y)) for the weight; see docs/module.md',
        )
    names: tuple[str, ...] = ()
    if task.metrics is not None:
        with author.answers("in its metrics, tried on two samples"), fork_rng(devices=[]), torch.no_grad():
            names = _metric_names(_called(model, task.metrics, batch), author)
    return counted._replace(metrics=(names,))


def _metric_names(metrics: Any, author: Author) -> tuple[str, ...]:
    pairs = metrics.items() if isinstance(metrics, Mapping) else ()
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for _, pair in pairs):
        raise UserError(
            f"model.build = {author.build!r}: its metrics returned {_described(metrics)}.",
            why="they must be a dictionary of (sum over the batch, weight)",
            do='{"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}; see docs/module.md',
        )
    taken = [name for name in metrics if name in RESERVED or str(name).startswith(("test_", "tasks."))]
    if taken:
        raise UserError(f"model.build = {author.build!r}: a metric is called {taken[0]!r}.", do="another name for it")
    return tuple(metrics)


def _called(model: nn.Module, loss: Loss | Metrics, batch: Any) -> Any:
    """What the loss gives; the model's state stays, whose running statistics a forward pass may move."""
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)
    state = copy.deepcopy(model.state_dict())
    loss_of = loss(model, to_device(batch, dtype=dtype))
    model.load_state_dict(state)
    return loss_of


def _count(model: nn.Module, loss: Loss, batch: Any) -> tuple[Any, Counted]:
    saved: dict[int, int] = {}
    of_parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that its own node keeps would keep the node, for ever

    with Counter() as counter, saved_tensors_hooks(save, lambda tensor: tensor):
        loss_value = _called(model, loss, batch)
    return loss_value, Counted(counter.total.macs, sum(saved.values()) / 2)  # two FLOP a MAC, of two samples


def _is_loss(value: Any) -> bool:
    if not (isinstance(value, tuple | list) and len(value) == 2):
        return False
    return all(isinstance(item, Tensor) and item.ndim == 0 for item in value) and bool(value[0].requires_grad)


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(_described(item) for item in value)})"
    if isinstance(value, Tensor):
        constant = "" if value.requires_grad or value.ndim else ", without gradient"
        return f"a tensor of shape {list(value.shape)}{constant}"
    return type(value).__name__


def collated(dataset: Any, indices: Sequence[int]) -> Any:
    """The samples at `indices` as one batch; a dataset may give several at once (`__getitems__`, as torch has it)."""
    several = getattr(dataset, "__getitems__", None)
    return default_collate(several(list(indices)) if several else [dataset[index] for index in indices])


def tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else []
    return [tensor for item in items for tensor in tensors(item)]


def length(dataset: Any) -> int:
    """How many samples there are."""
    return len(dataset)


SAMPLES = 64
"""So many samples stand for a dataset that is not made of tensors."""


def content(dataset: Any) -> str:
    """Hash of a dataset: of all tensors of a `TensorDataset`, else of its length and `SAMPLES` samples."""
    digest = xxhash.xxh3_128(str(length(dataset)).encode())
    if isinstance(dataset, TensorDataset):
        found_tensors = list(dataset.tensors)
    else:
        places = range(0, length(dataset), max(1, length(dataset) // SAMPLES))
        found_tensors = [tensor for place in places for tensor in tensors(collated(dataset, [place]))]
    for tensor in found_tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
