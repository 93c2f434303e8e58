"""torch.distributed.checkpoint's `.metadata` file, read without running what it may hold.

The file is a pickle. Ours is an unpickler with an allow-list of names and of opcodes, and even these make inert
records: only once the whole file is read are torch's own structures built, each field checked.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from espalier.recipe.errors import UserError

NAME = ".metadata"
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


def read(data: bytes, files: Mapping[str, int], name: str) -> Metadata:
    """The metadata in `data`.

    Args:
        data: the file's bytes.
        files: bytes of each file that belongs to the checkpoint; no other file may be named.
        name: what people call the file.

    Raises UserError for what torch.distributed.checkpoint does not write; the message has the refused name.
    """
    try:
        return _metadata(_MetadataUnpickler(io.BytesIO(data)).load(), files)
    except _Refused as refused:
        why = f"it names {refused}; unpickling that may run any code"
        raise UserError(f"{name} is not read.", why=why, do="do not use this checkpoint") from None
    except Exception as error:  # a damaged pickle raises anything
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{name} is damaged.", why=why, do="use another checkpoint") from None


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


class _MetadataUnpickler(pickle._Unpickler):  # the one in Python: its table of opcodes can be cut down
    dispatch: ClassVar = {code: load for code, load in pickle._Unpickler.dispatch.items() if code in _CODES}

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._made: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return name
        if name not in _OF.get(module, ()):
            raise _Refused(f"{module}.{name}")
        return self._made.setdefault(name, type(name, (_Record,), {}))


# --- torch's structures ----------------------------------------------------------------------------------------------


def _metadata(record: Any, files: Mapping[str, int]) -> Metadata:
    fields, room = _fields(record, "Metadata"), sum(files.values())
    storage = {_index(index): _stored(info, files) for index, info in _typed(fields["storage_data"], dict).items()}
    entries = _typed(fields["state_dict_metadata"], dict).items()
    return Metadata({_typed(name, str): _entry(entry, room) for name, entry in entries}, storage_data=storage)


def _entry(record: Any, room: int) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    properties = fields["properties"]
    _check(type(properties).__name__ == "TensorProperties", "a tensor has no properties")
    dtype, size = _typed(getattr(torch, _typed(properties.state[0], str)), torch.dtype), _size(fields["size"])
    _check(math.prod(size) * dtype.itemsize <= room, f"a tensor of {tuple(size)} is larger than all files together")
    chunks = [_chunk(chunk) for chunk in _typed(fields["chunks"], list)]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _chunk(record: Any) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _typed(fields["fqn"], str),
        None if offset is None else _size(offset),
        None if index is None else _typed(index, int),
    )


def _stored(record: Any, files: Mapping[str, int]) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    path, first, length = _typed(fields["relative_path"], str), fields.get("offset", 0), fields["length"]
    _check(path in files, f"{path!r} is no file of the checkpoint")
    _check(0 <= _typed(first, int) <= _typed(first + length, int) <= files[path], f"{path} is shorter than it says")
    _check(not fields.get("transform_descriptors"), f"{path} is transformed")
    return _StorageInfo(path, first, length)


def _size(record: Any) -> torch.Size:
    _check(type(record).__name__ == "Size", "a size is none")
    sizes = _typed(record.args[0], tuple)
    _check(all(type(size) is int and size >= 0 for size in sizes), f"{sizes} is no size")
    return torch.Size(sizes)


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
