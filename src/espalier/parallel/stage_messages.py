"""Messages between pipeline stages: tensors from rank to rank through the Channel, sent without waiting.

Shapes follow from those of the micro-batch. They are sent once for each, ahead of the first message.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from espalier.comm.base import Traffic, traffic
from espalier.recipe.errors import UserError

TENSORS = 8
HEADER = 512
"""Bytes of the message that says what follows: dtypes and shapes, as JSON."""


class MessageForm(NamedTuple):
    """Dtypes and shapes of what one stage gives the next: a tensor, or a `tuple` of them."""

    tensors: tuple[tuple[torch.dtype, torch.Size], ...]
    tuple: bool

    @classmethod
    def of(cls, value: Any, whose: str) -> MessageForm:
        """Of `value`. Raises UserError for what is neither a tensor nor a tuple of tensors."""
        several = isinstance(value, tuple | list)
        tensors = list(value) if several else [value]
        if not all(isinstance(tensor, Tensor) for tensor in tensors) or len(tensors) > TENSORS:
            raise UserError(
                f"{whose} gives {type(value).__name__}, which cannot go to other ranks.",
                why=f"a stage gives a tensor, or a tuple of at most {TENSORS} tensors",
                do="put what all stages can compute from the batch into `Pieces.given`",
            )
        return cls(tuple((tensor.dtype, tensor.shape) for tensor in tensors), several)

    def header(self) -> Tensor:
        """As uint8 [HEADER]."""
        rows = [(str(dtype).removeprefix("torch."), *shape) for dtype, shape in self.tensors]
        text = json.dumps([self.tuple, rows]).encode().ljust(HEADER)
        assert len(text) == HEADER, "shapes have a few dims"
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @classmethod
    def read(cls, header: Tensor) -> MessageForm:
        """From uint8 [HEADER]."""
        several, rows = json.loads(bytes(header.tolist()))
        return cls(tuple((getattr(torch, dtype), torch.Size(shape)) for dtype, *shape in rows), several)

    def packed(self, tensors: Sequence[Tensor]) -> Any:
        """As the stage gave them."""
        return tuple(tensors) if self.tuple else tensors[0]


def shapes_of(inputs: Any) -> Hashable:
    """What the shapes of a stage's outputs may depend on."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(inputs))


class StageMessages:
    """Has state: the forms that are known, what is on its way, and `waited`, the seconds of all waits for others.

    Args:
        group: the ranks of the pipelines; None where there is one.
        places: rank in `group` of every rank of the plan.
    """

    def __init__(self, group: dist.ProcessGroup | None, places: Mapping[int, int], device: torch.device) -> None:
        self._group = group
        self._places = places
        self._device = device
        self._known: dict[tuple[int, int, Hashable], MessageForm] = {}
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self.waited = 0.0

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, kind: Traffic = Traffic.ACTIVATIONS) -> None:
        """Begins to send; `finish` waits."""
        assert self._group is not None
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        with traffic(kind):
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                self._under_way.append((self._group.send([whole], self._places[peer], tag), whole))

    def receive(self, rooms: Sequence[Tensor], peer: int, tag: int, kind: Traffic = Traffic.ACTIVATIONS) -> None:
        """Fills `rooms` with what `peer` sends."""
        self.wait(self.expect(rooms, peer, tag, kind))

    def wait(self, works: Sequence[Any]) -> None:
        """Until they are done."""
        begun = time.perf_counter()
        for work in works:
            work.wait()
        self.waited += time.perf_counter() - begun

    def expect(self, rooms: Sequence[Tensor], peer: int, tag: int, kind: Traffic = Traffic.ACTIVATIONS) -> list[Any]:
        """Begins to receive; what is returned waits."""
        assert self._group is not None
        with traffic(kind):
            return [self._group.recv([room], self._places[peer], tag) for room in rooms]

    @property
    def early(self) -> bool:
        """Whether receives may begin early: on processors they hold up nothing else."""
        return self._device.type == "cpu"

    def known(self, peer: int, tag: int, key: Hashable) -> MessageForm | None:
        """The form of what `peer` sends, if it was told and its receive may begin early."""
        return self._known.get((peer, tag, key)) if self.early else None

    def announce(self, form: MessageForm, peer: int, tag: int, key: Hashable) -> None:
        """Tells `peer` the form of what is sent for micro-batches of `key`, unless it knows it."""
        known = self._known.setdefault((peer, tag, key), form)
        if known is form:
            self.send([form.header().to(self._device)], peer, tag, Traffic.CONTROL)
        elif known != form:
            raise UserError(
                f"A pipeline stage gives {form} where it gave {known} for a micro-batch of the same shapes.",
                do="shapes may depend on those of the batch only; or plan.pin.pp=1",
            )

    def form(self, peer: int, tag: int, key: Hashable) -> MessageForm:
        """The form of what `peer` sends for micro-batches of `key`."""
        if (peer, tag, key) not in self._known:
            header = torch.empty(HEADER, dtype=torch.uint8, device=self._device)
            self.receive([header], peer, tag, Traffic.CONTROL)
            self._known[peer, tag, key] = MessageForm.read(header)
        return self._known[peer, tag, key]

    def rooms(self, form: MessageForm) -> list[Tensor]:
        """Memory for tensors of that form."""
        return [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape in form.tensors]

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        self.wait([work for work, _ in self._under_way])
        self._under_way.clear()
