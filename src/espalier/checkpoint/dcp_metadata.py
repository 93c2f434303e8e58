"""torch.distributed.checkpoint's `.metadata` file, written without that package, and read without running what it may
hold.

The file is a pickle. Ours is an unpickler with an allow-list of names and of opcodes, and even these make inert
records; each field is checked. The package takes more than a second to import, and is not needed.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch

from espalier.checkpoint.tensor_slice import Box
from espalier.recipe.errors import UserError

NAME = ".metadata"
VERSION = "1.0.0"
"""Of the file's format, as torch.distributed.checkpoint writes it."""
_OF = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip
_OPCODES = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 SHORT_BINUNICODE BINUNICODE
EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SETITEM SETITEMS APPEND APPENDS MEMOIZE BINPUT LONG_BINPUT
BINGET LONG_BINGET STACK_GLOBAL GLOBAL NEWOBJ REDUCE BUILD"""
_CODES = {getattr(pickle, name)[0] for name in _OPCODES.split()}


class FileRange(NamedTuple):
    """Where something is stored: bytes `[first, first + length)` of a file of the checkpoint."""

    file: str
    first: int
    length: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint.

    Attributes:
        dtype, shape: of the whole tensor.
        ranges: where each of the boxes is stored of which it is made.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    ranges: dict[Box, FileRange]


Saved = dict[str, SavedTensor | FileRange]
"""What a checkpoint holds by flat name: tensors and bytes."""


def read(data: bytes, files: Mapping[str, int], name: str) -> Saved:
    """What the metadata in `data` says.

    Args:
        data: the file's bytes.
        files: bytes of each file that belongs to the checkpoint; no other file may be named.
        name: what people call the file.

    Raises UserError for what torch.distributed.checkpoint does not write; the message has the refused name.
    """
    try:
        return _saved(_MetadataUnpickler(io.BytesIO(data)).load(), files)
    except _Refused as refused:
        why = f"it names {refused}; unpickling that may run any code"
        raise UserError(f"{name} is not read.", why=why, do="do not use this checkpoint") from None
    except Exception as error:  # a damaged pickle raises anything
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{name} is damaged.", why=why, do="use another checkpoint") from None


def dumps(saved: Saved) -> bytes:
    """The file's bytes, as torch.distributed.checkpoint reads them."""
    entries = {}
    storage = {}
    for name, entry in saved.items():
        if isinstance(entry, FileRange):
            entries[name] = _record("BytesStorageMetadata", {})
            storage[_record("MetadataIndex", {"fqn": name, "index": None})] = _stored_at(entry)
            continue
        chunks = [
            _record("ChunkStorageMetadata", {"offsets": torch.Size(box.offsets), "sizes": torch.Size(box.sizes)})
            for box in entry.ranges
        ]
        contiguous = _record("_MEM_FORMAT_ENCODING", None, 0)
        properties = _record("TensorProperties", (entry.dtype, torch.strided, False, contiguous, False))
        shape = torch.Size(entry.shape)
        fields = {"properties": properties, "size": shape, "chunks": chunks}
        entries[name] = _record("TensorStorageMetadata", fields)
        for box, place in entry.ranges.items():
            index = {"fqn": name, "index": None, "offset": torch.Size(box.offsets)}
            storage[_record("MetadataIndex", index)] = _stored_at(place)
    fields = {"state_dict_metadata": entries, "planner_data": None, "storage_data": storage, "storage_meta": None}
    file = io.BytesIO()
    _MetadataPickler(file, 2).dump(_record("Metadata", {**fields, "version": VERSION}))
    return file.getvalue()


_PythonPickler: Any = vars(pickle)["_Pickler"]
_NEW: Any = vars(copyreg)["__newobj__"]


class _Refused(Exception):
    """A name that is not on the list."""


class _Record:
    """Stands for an object of torch's: what it was to be made from."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> _Record:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __reduce_ex__(self, _: Any) -> Any:
        return (type(self), self.args) if self.args else (_NEW, (type(self),), self.state)


class _MetadataPickler(_PythonPickler):  # that in C imports what it names
    def save_global(self, obj: Any, name: str | None = None) -> None:
        module = "torch" if name is not None else obj.__module__  # a type of elements
        self.write(pickle.GLOBAL + f"{module}\n{name or obj.__qualname__}\n".encode())
        self.memoize(obj)


class _MetadataUnpickler(pickle._Unpickler):  # the one in Python: its table of opcodes can be cut down
    dispatch: ClassVar = {code: load for code, load in pickle._Unpickler.dispatch.items() if code in _CODES}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return name
        if name not in _OF.get(module, ()):
            raise _Refused(f"{module}.{name}")
        return _kind(name)


@cache
def _kind(name: str) -> type[_Record]:
    module = next(module for module, names in _OF.items() if name in names)
    return type(name, (_Record,), {"__module__": module})


def _record(name: str, state: Any, *args: Any) -> _Record:
    record = _kind(name)(*args)
    record.state = state
    return record


# --- records to values -----------------------------------------------------------------------------------------------


def _saved(record: Any, files: Mapping[str, int]) -> Saved:
    fields = _fields(record, "Metadata")
    stored: dict[tuple[str, Any], FileRange] = {}
    for index, info in _typed(fields["storage_data"], dict).items():
        stored[_index(index)] = _stored(info, files)
    entries = _typed(fields["state_dict_metadata"], dict).items()
    return {_typed(name, str): _entry(name, entry, stored, sum(files.values())) for name, entry in entries}


def _entry(name: str, record: Any, stored: Mapping[Any, FileRange], room: int) -> SavedTensor | FileRange:
    if type(record).__name__ == "BytesStorageMetadata":
        return stored[name, None]
    fields = _fields(record, "TensorStorageMetadata")
    properties = fields["properties"]
    _check(type(properties).__name__ == "TensorProperties", "a tensor has no properties")
    dtype = _typed(getattr(torch, _typed(properties.state[0], str)), torch.dtype)
    shape = _size(fields["size"])
    _check(math.prod(shape) * dtype.itemsize <= room, f"a tensor of {shape} is larger than all files together")
    boxes = [_box(chunk) for chunk in _typed(fields["chunks"], list)]
    return SavedTensor(dtype, shape, {box: stored[name, box.offsets] for box in boxes})


def _box(record: Any) -> Box:
    fields = _fields(record, "ChunkStorageMetadata")
    return Box(_size(fields["offsets"]), _size(fields["sizes"]))


def _index(record: Any) -> tuple[str, tuple[int, ...] | None]:
    fields = _fields(record, "MetadataIndex")
    offset = fields.get("offset")
    return _typed(fields["fqn"], str), None if offset is None else _size(offset)


def _stored(record: Any, files: Mapping[str, int]) -> FileRange:
    fields = _fields(record, "_StorageInfo")
    path = _typed(fields["relative_path"], str)
    first = fields.get("offset", 0)
    length = fields["length"]
    _check(path in files, f"{path!r} is no file of the checkpoint")
    _check(0 <= _typed(first, int) <= _typed(first + length, int) <= files[path], f"{path} is shorter than it says")
    _check(not fields.get("transform_descriptors"), f"{path} is transformed")
    return FileRange(path, first, length)


def _stored_at(place: FileRange) -> _Record:
    fields = {"relative_path": place.file, "offset": place.first, "length": place.length}
    return _record("_StorageInfo", fields)


def _size(record: Any) -> tuple[int, ...]:
    _check(type(record).__name__ == "Size", "a size is none")
    sizes = _typed(record.args[0], tuple)
    _check(all(type(size) is int and size >= 0 for size in sizes), f"{sizes} is no size")
    return tuple(sizes)


def _fields(record: Any, name: str) -> dict[str, Any]:
    _check(type(record).__name__ == name, f"{type(record).__name__} where {name} belongs")
    return _typed(record.state, dict)


def _check(fine: bool, why: str) -> None:
    if not fine:
        raise ValueError(why)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} where {kind.__name__} belongs")
    return value
