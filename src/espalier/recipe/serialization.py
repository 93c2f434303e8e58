"""Safe serialization of plain values. The set of types is closed, so decoding builds values and runs no code.

The bytes are msgpack. What msgpack does not have (tuples, tables whose keys are not text or numbers, arrays, tensors)
travels as extension types. A value of any other type is refused when it is encoded, with the place where it stands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
from msgspec.msgpack import Ext

from espalier.recipe.errors import UserError

_TUPLE, _TABLE, _LARGE, _ARRAY, _SCALAR, _TENSOR, _DTYPE, _SIZE, _PLACEHOLDER = range(1, 10)
_PLAIN = (type(None), bool, float, bytes)
_INT64, _UINT64 = -(2**63), 2**64
_ARRAYS = "biufc"  # kinds of NumPy's dtypes: numbers, no objects
_CONTENT = "tensors, arrays, numbers, text, bytes, None, and dicts, lists and tuples of them can be"


class Value(msgspec.Struct, frozen=True):
    """Base of plain values: sections of a recipe, parts of a plan and of a cluster."""

    def changed(self, **fields: Any) -> Self:
        """The same with other `fields`."""
        return msgspec.structs.replace(self, **fields)


class Placeholder(NamedTuple):
    """Stands in a value for something that is kept elsewhere, under this name."""

    name: str


def dumps(value: Any, name: str = "value") -> bytes:
    """`value` as bytes; `loads` gives back an equal value of the same types (a Mapping comes back as a dict).

    Raises UserError for a type that is not in the set; the message has its place, such as `model/steps/#3`.
    """
    try:
        return msgspec.msgpack.encode(_encoded(value, name))
    except RecursionError:
        raise UserError(f"{name} cannot be encoded: it is nested too deeply, or holds itself.") from None


def loads(data: bytes | bytearray | memoryview, name: str = "value") -> Any:
    """What `dumps` encoded. Raises UserError for any other bytes; `name` stands in the message."""
    try:
        return _decode(data)
    except UserError:
        raise
    except Exception as error:  # of msgspec, of a constructor, of a name that is no dtype
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise UserError(f"{name} cannot be decoded.", why=why, do="use bytes that this program has written") from None


def from_json(text: bytes | str, kind: Any = Any) -> Any:
    """The value of type `kind` in JSON `text`. Raises msgspec.DecodeError for any other text, however deep it nests."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (RecursionError, UnicodeError) as error:
        raise msgspec.DecodeError(str(error)) from None


def word(key: Any) -> str:
    """A table's key as it stands in names: text as it is, else `#` and how Python writes it."""
    return key if isinstance(key, str) else f"#{key!r}"


# --- encoding --------------------------------------------------------------------------------------------------------


def _encoded(value: Any, name: str) -> Any:
    """`value` in msgpack's own types and extensions."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if _INT64 <= value < _UINT64 else Ext(_LARGE, _large(value))
    if kind is str:
        return _text(value, name)
    if kind is list:
        return [_encoded(item, f"{name}/{index}") for index, item in enumerate(value)]
    if kind is tuple:
        return _nested(_TUPLE, [_encoded(item, f"{name}/{index}") for index, item in enumerate(value)])
    if isinstance(value, Mapping):
        return _table(value, name)
    if kind is Placeholder:
        return Ext(_PLACEHOLDER, value.name.encode())
    return _array(value, name)


def _large(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _text(value: str, name: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} cannot be encoded: {error}.") from None
    return value


def _table(value: Mapping[Any, Any], name: str) -> Any:
    if all(type(key) is str or (type(key) is int and _INT64 <= key < _UINT64) for key in value):
        return {_encoded(key, name): _encoded(item, f"{name}/{word(key)}") for key, item in value.items()}
    pairs = [[_encoded(key, name), _encoded(item, f"{name}/{word(key)}")] for key, item in value.items()]
    return _nested(_TABLE, pairs)


def _nested(code: int, value: Any) -> Ext:
    return Ext(code, msgspec.msgpack.encode(value))


def _array(value: Any, name: str) -> Ext:
    """Of NumPy's and torch's types; both are imported only where such a value can be."""
    import numpy as np
    import torch

    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        dense = value.detach().cpu().contiguous()
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # of one element, or of none, any stride fits
        return _nested(_TENSOR, [_dtype_name(value.dtype), list(value.shape), flat.numpy().data])
    if isinstance(value, torch.dtype):
        return Ext(_DTYPE, _dtype_name(value).encode())
    if isinstance(value, torch.Size):
        return _nested(_SIZE, list(value))
    if type(value) is np.ndarray and value.dtype.kind in _ARRAYS:
        return _nested(_ARRAY, [value.dtype.str, list(value.shape), value.tobytes()])
    if isinstance(value, np.generic) and value.dtype.kind in _ARRAYS:
        return _nested(_SCALAR, [value.dtype.str, value.tobytes()])
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise UserError(f"{name} is of type {kind} and cannot be encoded.", why=_CONTENT, do=f"give {name} as one of these")


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# --- decoding --------------------------------------------------------------------------------------------------------


_DECODER = msgspec.msgpack.Decoder(ext_hook=lambda code, data: _READ[code](data))
_decode = _DECODER.decode


def _dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _tensor(data: memoryview) -> Any:
    import torch

    name, shape, body = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytes])
    dtype = _dtype(name)
    _fits(shape, dtype.itemsize, body)
    flat = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def _numbers(data: memoryview) -> Any:
    import numpy as np

    text, shape, body = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytes])
    dtype = _numpy_dtype(text)
    _fits(shape, dtype.itemsize, body)
    return np.frombuffer(bytearray(body), dtype=dtype).reshape(shape)


def _scalar(data: memoryview) -> Any:
    import numpy as np

    text, body = msgspec.msgpack.decode(data, type=tuple[str, bytes])
    return np.frombuffer(body, dtype=_numpy_dtype(text), count=1)[0]


def _numpy_dtype(text: str) -> Any:
    import numpy as np

    dtype = np.dtype(text)
    if dtype.kind not in _ARRAYS or dtype.shape:
        raise ValueError(f"{text!r} is no dtype of numbers")
    return dtype


def _fits(shape: list[int], item: int, body: bytes) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) * item != len(body):
        raise ValueError(f"{len(body)} bytes are no elements of shape {shape}")


def _size(data: memoryview) -> Any:
    import torch

    return torch.Size(msgspec.msgpack.decode(data, type=list[int]))


_READ: dict[int, Callable[[memoryview], Any]] = {
    _TUPLE: lambda data: tuple(_checked(data, list)),
    _TABLE: lambda data: dict(_checked(data, list)),
    _LARGE: lambda data: int.from_bytes(data, "little", signed=True),
    _ARRAY: _numbers,
    _SCALAR: _scalar,
    _TENSOR: _tensor,
    _DTYPE: lambda data: _dtype(str(data, "utf-8")),
    _SIZE: _size,
    _PLACEHOLDER: lambda data: Placeholder(str(data, "utf-8")),
}


def _checked(data: memoryview, kind: type) -> Any:
    value = _decode(data)
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} where a {kind.__name__} belongs")
    return value


# --- files that are always the same bytes --------------------------------------------------------------------------


def sort_metadata(file: Path) -> None:
    """Puts the metadata of a safetensors file that was just written in the order of their names, in place: the library
    writes them in any order."""
    with file.open("r+b") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the same keys take the same room"
        content.seek(8)
        content.write(text.ljust(length))
