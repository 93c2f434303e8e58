"""State trees: a part's state as flat tensors plus a skeleton of everything else, and back; and its CPU copy.

torch's own flattening turns integer keys into text and loses empty tables, which an optimizer's state does not
survive; here the skeleton keeps every plain value as it was, with a `Placeholder` where each tensor stood.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from espalier.checkpoint.base import StatefulParts
from espalier.checkpoint.stored_slice import StoredSlice
from espalier.checkpoint.tensor_slice import Box, Slice
from espalier.kernels import accelerator
from espalier.recipe import serialization
from espalier.recipe.errors import UserError
from espalier.recipe.serialization import Placeholder

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Kept = Tensor | Slice
"""What a hole stands for: a tensor (a DTensor where it is sharded evenly), or this rank's part of one."""

KeptTensors = Mapping[str, Kept]
"""By flat name."""

SKELETON = "skeleton:"
"""Begins the flat name of a part's skeleton."""


def flatten(parts: StatefulParts) -> tuple[dict[str, Kept], dict[str, bytes]]:
    """(tensors by flat name, encoded skeletons by `SKELETON` + part) of what `parts` hold now.

    The tensors are the parts' own; the skeletons are copies, so a part may go on changing its lists and tables.
    Raises UserError naming what is in a part's state and cannot be encoded (`serialization`).
    """
    tensors: dict[str, Kept] = {}
    skeletons = {
        SKELETON + name: serialization.dumps(split(part.state_dict(), name, tensors), name)
        for name, part in parts.items()
    }
    return tensors, skeletons


def split(state: Any, name: str, tensors: dict[str, Kept]) -> Any:
    """The skeleton of `state`; its tensors go into `tensors` under names that begin with `name`.

    Tables, lists and tuples are walked; any other value belongs to the skeleton.
    """
    if isinstance(state, Kept):
        if name in tensors:
            raise UserError(f"Two tensors of the state are called {name}.", do="rename a key that holds a '/'")
        tensors[name] = state.detach() if isinstance(state, Tensor) else state
        return Placeholder(name)
    if isinstance(state, Mapping):
        return {key: split(value, f"{name}/{serialization.word(key)}", tensors) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(split(value, f"{name}/{index}", tensors) for index, value in enumerate(state))
    return state


def join(skeleton: Any, tensor: Callable[[str], Kept]) -> Any:
    """The state again: each hole filled with `tensor(name)`."""
    if isinstance(skeleton, Placeholder):
        return tensor(skeleton.name)
    if isinstance(skeleton, dict):
        return {key: join(value, tensor) for key, value in skeleton.items()}
    if type(skeleton) in (list, tuple):
        return type(skeleton)(join(value, tensor) for value in skeleton)
    return skeleton


def holes(skeleton: Any) -> Iterator[str]:
    """The flat names of the tensors that belong into `skeleton`."""
    if isinstance(skeleton, Placeholder):
        yield skeleton.name
    elif isinstance(skeleton, dict):
        for value in skeleton.values():
            yield from holes(value)
    elif type(skeleton) in (list, tuple):
        for value in skeleton:
            yield from holes(value)


class StagingBuffers:
    """CPU copies of tensors. Has state: the buffers, kept from one save to the next (pinned for CUDA tensors)."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: KeptTensors, changing: bool = True) -> dict[str, Kept]:
        """Copies of `tensors` (of this rank's part where they are cut) that stay as they are until the next call; what
        is not in memory as it is. Not `changing`: nor is what is in this memory, as training waits."""
        copies: dict[str, Kept] = {}
        fresh: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, StoredSlice) or not (changing or accelerator.is_on(local(tensor))):
                copies[name] = tensor
                continue
            local_tensor = local(tensor)
            buffer = fresh[name] = self._buffer(name, local_tensor)
            buffer.copy_(local_tensor, non_blocking=accelerator.is_on(local_tensor))
            copies[name] = _like(tensor, buffer)
        if any(accelerator.is_on(tensor.device) for tensor in tensors.values()):
            accelerator.synchronize()
        self._buffers = fresh
        return copies

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == like.shape and buffer.dtype == like.dtype:
            return buffer
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=accelerator.is_on(like))


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor: nothing is where nobody has imported that class, which takes a second."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local(tensor: Kept) -> Tensor:
    """This rank's elements of `tensor`."""
    if isinstance(tensor, Slice):
        return tensor.local
    return tensor.to_local() if is_dtensor(tensor) else tensor


def boxes(tensor: Kept) -> list[Box]:
    """Where this rank's elements lie in the whole tensor."""
    if isinstance(tensor, Slice):
        return tensor.boxes()
    if not is_dtensor(tensor):
        return [Box.whole(tensor.shape)]
    if tensor.device_mesh.get_coordinate() is None:
        return []
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.__create_chunk_list__()]


def of_box(tensor: Kept, box: Box) -> Tensor:
    """The elements of one of its `boxes`."""
    return (tensor.of_box(box) if isinstance(tensor, Slice) else local(tensor)).detach()


def _like(tensor: Kept, local: Tensor) -> Kept:
    if isinstance(tensor, Slice):
        return tensor.of(local)
    if not is_dtensor(tensor):
        return local
    return type(tensor).from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
