"""What the parts of tasks cost: operations, bytes and, on processors, seconds of real passes on one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from espalier.kernels import accelerator
from espalier.kernels.counts import Counter
from espalier.machine import measure
from espalier.parallel.workload import HEAD
from espalier.recipe.cost import PartCost
from espalier.tasks.towers import Fields, FieldTower, MultitaskModel

COUNTED = 2
"""Samples of a pass that is counted."""
ROUNDS = 11
"""Passes of which the middle one is taken."""
LAUNCHES = 60
"""Operations of a block, forward and backward, that a host issues: counted on a transformer block, and rounded."""


def parts(model: MultitaskModel, batches: Sequence[Fields], measures: bool) -> tuple[PartCost, ...]:
    """The parts of all tasks with their costs, from a batch of each task.

    Where there are GPUs, a pass backward starts threads for them, and ranks are forked later: a child does it.
    """
    if not accelerator.available():
        return _parts(model, batches, measures)

    def apart(gate: measure.Gate, index: int) -> measure.Table:
        return {"parts": [msgspec.to_builtins(part) for part in _parts(model, batches, measures)]}

    return msgspec.convert(measure.together(1, apart)[0]["parts"], tuple[PartCost, ...])


def _parts(model: MultitaskModel, batches: Sequence[Fields], measures: bool) -> tuple[PartCost, ...]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        known = [pair for task, fields in enumerate(batches) for pair in _of_task(model, task, fields)]
        parts = _measured(known) if measures else [part for part, _ in known]
    finally:
        torch.set_num_threads(threads)
        model.zero_grad(set_to_none=True)
    return tuple(parts)


def _measured(known: Sequence[tuple[PartCost, _PartPass]]) -> list[PartCost]:
    """With seconds of passes of all, half and a quarter of the samples. As in a step all parts run forward, then all of
    them backward in the reverse order, so that what one has in the caches others have driven out."""
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(ROUNDS + 1):
        for share in (1, 2, 4):
            made = [(part, pass_, rows_of(part, share), *pass_.forward(rows_of(part, share))) for part, pass_ in known]
            for part, pass_, rows, root, there in reversed(made):
                back = pass_.backward(root)
                if number:  # the first round warms up
                    taken.setdefault((part.key, rows), []).append((there, back))
    measured = []
    for part, _ in known:
        passes_by_rows = {rows: passes for (key, rows), passes in taken.items() if key == part.key}
        seconds = {
            rows: statistics.median(map(sum, passes)) / part.operators
            for rows, passes in sorted(passes_by_rows.items())
        }
        forward = statistics.median(there / (there + back) for there, back in passes_by_rows[part.rows])
        measured.append(replace(part, seconds=seconds, forward=forward))
    return measured


def rows_of(part: PartCost, share: int) -> int:
    """Samples of one of so many ranks that share them."""
    return part.rows if part.whole else -(-part.rows // share)


def _of_task(model: MultitaskModel, task: int, fields: Fields) -> list[tuple[PartCost, _PartPass]]:
    name = model.tasks[task].name
    size = len(next(iter(fields.values())))
    outputs: dict[str, Tensor] = {}
    passes = []
    for node in model.nodes(task):
        call = partial(model.compute, task, node.name, (0, node.operators))
        pass_ = _PartPass(call, [outputs[need] for need in node.needs], fields)
        whole = node.name == HEAD and bool(model.heads[name].whole)
        module = model.heads[name] if node.name == HEAD else model.towers[node.name]
        unlike = whole or isinstance(module, FieldTower)  # rays cross more or less of a field
        flops, saved = pass_.counted(size if unlike else min(COUNTED, size))
        output = 0.0
        if node.name != HEAD:
            with torch.no_grad():
                outputs[node.name] = pass_.run(size)
            output = outputs[node.name].nbytes / size
        part = PartCost(
            name,
            node.name,
            node.operators,
            tuple(f"{name}.{need}" for need in node.needs),
            f"{HEAD}.{name}" if node.name == HEAD else node.name,
            size,
            whole,
            flops=3 * flops / node.operators,
            launches=LAUNCHES,
            parameters=sum(parameter.nbytes for parameter in module.parameters()) / node.operators,
            saved=saved / node.operators,
            output=output,
        )
        passes.append((part, pass_))
    return passes


@dataclass(frozen=True, eq=False)
class _PartPass:
    """A part of a task on some of its samples."""

    call: Callable[[Sequence[Tensor], Any], Any]
    inputs: Sequence[Tensor]
    fields: Any

    def run(self, rows: int, gradient: bool = False) -> Any:
        taken = [value[:rows].detach().requires_grad_(gradient) for value in self.inputs]
        return self.call(taken, {name: value[:rows] for name, value in self.fields.items()})

    def counted(self, rows: int) -> tuple[float, float]:
        """Operations of the forward pass, and bytes that it keeps, of one sample."""
        saved = {}

        def save(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor.detach()

        with Counter() as counter, saved_tensors_hooks(save, lambda tensor: tensor):
            self.run(rows, True)
        return 2 * counter.total.macs / rows, sum(saved.values()) / rows

    def forward(self, rows: int) -> tuple[Tensor, float]:
        """What backward begins at, and seconds."""
        begun = time.perf_counter()
        made = self.run(rows, True)
        return made["loss"][0] if isinstance(made, dict) else made, time.perf_counter() - begun

    def backward(self, root: Tensor) -> float:
        """Seconds."""
        begun = time.perf_counter()
        torch.autograd.backward(root, torch.ones_like(root))
        return time.perf_counter() - begun
