"""Checkpoint reader: the skeletons, room for each tensor, the tensors; then each part takes its own.

Nothing in the files is run: skeletons are plain values, the metadata goes through an allow-list, tensors
through torch's weights-only loader.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import IO, Any, cast

import torch
from torch import Tensor

from espalier.checkpoint import dcp_metadata, state_tree
from espalier.checkpoint.base import StateDict, Stateful, StatefulParts
from espalier.checkpoint.dcp_metadata import FileRange, Saved, SavedTensor
from espalier.checkpoint.manifest import FileHash
from espalier.checkpoint.storage import Storage
from espalier.checkpoint.stored_slice import StoredSlice
from espalier.checkpoint.tensor_slice import Slice
from espalier.recipe import serialization
from espalier.recipe.errors import EspalierError, UserError

PICKLED = b"PK\x03\x04"
"""How torch's archive of a pickled skeleton begins (format 1)."""


def restore(place: Storage, name: str, files: Mapping[str, FileHash], parts: StatefulParts) -> list[str]:
    """Reads checkpoint `name`, which has these `files`, into `parts`; names of the parts it does not have. This rank's
    share only, no waiting.

    Raises UserError when a file holds what this program does not write, or a part refuses what it is given.
    """
    path = place.path(name)
    with place.open(name, dcp_metadata.NAME) as file:
        sizes = {name: entry.bytes for name, entry in files.items()}
        saved = dcp_metadata.read(file.read(), sizes, f"{path}/{dcp_metadata.NAME}")
    present = [part for part in parts if state_tree.SKELETON + part in saved]
    skeletons = {part: _skeleton(place, name, part, saved) for part in present}
    flat, _ = state_tree.flatten({part: parts[part] for part in present})
    tensors: dict[str, state_tree.Kept] = {}
    for skeleton in skeletons.values():
        for hole in state_tree.holes(skeleton):
            tensors[hole] = _room(saved, hole, flat.get(hole))
    fill(place, name, saved, tensors)
    for part in present:
        _give(parts[part], part, state_tree.join(skeletons[part], tensors.__getitem__), name)
    return [part for part in parts if part not in present]


def _skeleton(place: Storage, name: str, part: str, saved: Saved) -> Any:
    path = place.path(name)
    stored = saved[state_tree.SKELETON + part]
    if not isinstance(stored, FileRange):
        raise UserError(f"{state_tree.SKELETON + part!r} in {path} is no skeleton.", do="use another checkpoint")
    with place.open(name, stored.file) as file:
        blob = FilePart(file, stored).read()
    if not blob.startswith(PICKLED):
        return serialization.loads(blob, f"The state of {part!r} in {path}")
    raise UserError(
        f"The checkpoint {path} has the old format, which is not loaded.",
        why=f"the state of {part!r} in it is pickled, and unpickling can execute arbitrary code",
        do="a checkpoint that this version of espalier wrote",
    )


class FilePart(io.RawIOBase):
    """A part of an open file, as a file of its own. Has state: where it is read."""

    def __init__(self, file: IO[bytes], part: FileRange) -> None:
        self._file = file
        self._part = part
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._part.length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._part.first + self._at)
        data = self._file.read(min(len(buffer), max(0, self._part.length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def fill(place: Storage, name: str, saved: Saved, tensors: Mapping[str, state_tree.Kept]) -> None:
    """Reads what is saved of `tensors` into them, file by file."""
    try:
        for file in {stored.file for key in tensors for stored in _tensor(saved, key).ranges.values()}:
            with place.open(name, file) as opened:
                for key, tensor in tensors.items():
                    _fill_from(opened, file, _tensor(saved, key), tensor)
    except (EspalierError, OSError, MemoryError):
        raise
    except Exception as error:  # torch's, pickle's and zip's errors have no common base
        named = re.search(r"GLOBAL (\S+)", str(error))  # what torch's loader refused
        why = f"it names {named[1]}" if named else f"{type(error).__name__}: {error}"
        raise UserError(f"A file of {place.path(name)} does not hold the tensors it should.", why=why) from error


def _fill_from(opened: IO[bytes], file: str, saved: SavedTensor, tensor: state_tree.Kept) -> None:
    stored_boxes = [box for box, stored in saved.ranges.items() if stored.file == file]
    boxes = state_tree.boxes(tensor) if stored_boxes else []
    for stored_box in stored_boxes:
        parts = [(box, part) for box in boxes if (part := box.overlap(stored_box)) is not None]
        if not parts:
            continue
        stored = saved.ranges[stored_box]
        part_of_file = cast("IO[bytes]", FilePart(opened, stored))
        values: Tensor = torch.load(part_of_file, map_location="cpu", weights_only=True)
        if tuple(values.shape) != stored_box.sizes:
            raise ValueError(f"a tensor of {tuple(values.shape)} where one of {stored_box.sizes} belongs")
        for box, part in parts:
            taken = part.within(values, stored_box)
            if isinstance(tensor, StoredSlice):
                tensor.put(box, part, taken.to(tensor.dtype))
            else:
                part.within(state_tree.of_box(tensor, box), box).copy_(taken)


def _tensor(saved: Saved, name: str) -> SavedTensor:
    tensor = saved.get(name)
    if not isinstance(tensor, SavedTensor):
        raise UserError(f"The checkpoint has no tensor {name}, and its skeleton names it.", do="use another checkpoint")
    return tensor


def _room(saved: Saved, name: str, value: state_tree.Kept | None) -> state_tree.Kept:
    """What to read `name` into: the part's own where it fits, else a new one on the CPU."""
    tensor = _tensor(saved, name)
    shape = torch.Size(tensor.shape)
    dtype = tensor.dtype
    if isinstance(value, Slice) and value.shape != shape:
        value = value.saved_as(shape) or value
    if (state_tree.is_dtensor(value) or isinstance(value, Slice)) and value.shape != shape:
        raise UserError(
            f"The checkpoint's {name} has shape {tensor.shape}, the run's has {tuple(value.shape)}.",
            do="resume with the recipe the run began with, or start a new run with --run FOLDER",
        )
    if value is not None and value.shape == shape and value.dtype == dtype:
        return value
    if isinstance(value, Slice):  # another precision
        return value.of(torch.empty(value.local.shape, dtype=dtype))
    return torch.empty(shape, dtype=dtype)


def _give(part: Stateful, name: str, state: StateDict, checkpoint: str) -> None:
    try:
        part.load_state_dict(state)
    except EspalierError:
        raise
    except Exception as error:
        raise UserError(
            f"The run's {name} does not take its state from {checkpoint}.",
            why=f"{type(error).__name__}: {error}",
            do="resume with the recipe the run began with, or start a new run with --run FOLDER",
        ) from error
