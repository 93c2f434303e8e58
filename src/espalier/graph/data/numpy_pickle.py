"""Pickles of NumPy arrays, SciPy's CSR matrices and plain containers, read so that nothing in them can run.

An unpickler that knows these and nothing else. An array is made here of the bytes of its state, and only of whole
numbers, floats and truth values: NumPy is never called with a buffer, a dtype or a shape of the file.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from espalier.graph.data.graph import Array
from espalier.machine.resource_limits import refuse_large
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing, printable

_DTYPE = re.compile(r"[<>=|]?(b1|[iuf][1248])")
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
"""The first of the pickles that `torch.save` wrote one after the other before it wrote archives."""


class _Kind:
    """A dtype: its code, and its byte order once that is set."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not _DTYPE.fullmatch(code):
            raise pickle.UnpicklingError(f"it has an array of dtype {printable(code)}, which is no number")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Values:
    """An array, once its state is set."""

    def __init__(self, *_: Any) -> None:
        self.array = np.zeros(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _Kind):
            raise pickle.UnpicklingError("it has an array without a dtype")
        content = content.encode("latin1") if isinstance(content, str) else content
        if not isinstance(content, bytes):
            raise pickle.UnpicklingError("it has an array of objects, which are no numbers")
        self.array = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if fortran else "C")


class ScipyMatrix:
    """A SciPy CSR matrix's state: data, indices, indptr and _shape."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state

    def dense(self) -> Array:
        """float32 [rows, columns]. Raises ValueError where the state is no matrix, or larger than memory."""
        rows, columns = self.state["_shape"]
        indptr, indices, data = (self.state[name].array for name in ("indptr", "indices", "data"))
        if len(indptr) != rows + 1 or indptr[-1] != len(indices) or (indices < 0).any():
            raise ValueError("it has a sparse matrix whose rows do not fit its columns")
        refuse_large(f"a matrix of {rows:,} rows and {columns:,} columns", rows * columns * 4)
        matrix = np.zeros((rows, columns), np.float32)
        matrix[np.repeat(np.arange(rows), np.diff(indptr)), indices] = data
        return matrix


class _Call:
    """What a pickle may call. Made anew for each, so that no pickle can change what another one calls."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)


def _latin(text: str, _: str = "latin1") -> bytes:
    return text.encode("latin1")


def _buffer(*_: Any) -> None:
    raise pickle.UnpicklingError("it has an array that lies on a buffer of the file")


_KNOWN: dict[tuple[str, str], Callable[[], Any]] = {
    ("collections", "defaultdict"): lambda: defaultdict,
    ("__builtin__", "list"): lambda: list,
    ("builtins", "list"): lambda: list,
    ("numpy", "ndarray"): lambda: _Call(_buffer),  # an argument of `_reconstruct`
    ("numpy", "dtype"): lambda: _Call(_Kind),
    ("_codecs", "encode"): lambda: _Call(_latin),
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda: _Call(_Values) for core in ("core", "_core")},
    **{
        (f"scipy.sparse{part}", "csr_matrix"): lambda: type("Csr", (ScipyMatrix,), {}) for part in ("", ".csr", "._csr")
    },
}


class _Careful(pickle._Unpickler):  # in Python, whose memo is a dict: that of C is as large as a file says
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {printable(f'{module}.{name}')}, which is no array")
        return _KNOWN[module, name]()


def _read(file: IO[bytes]) -> Any:
    value = _Careful(file, encoding="latin1").load()
    if isinstance(value, dict):
        return {name: part.array if isinstance(part, _Values) else part for name, part in value.items()}
    return value.array if isinstance(value, _Values) else value


def read(path: Path, do: str) -> Any:
    """What a pickle holds: an array, a `ScipyMatrix`, or plain containers. Raises UserError for anything else."""
    with parsing(path, do), path.open("rb") as file:
        return _read(file)


def matrix(path: Path, do: str) -> Array:
    """The matrix [rows, columns] that a pickle holds, dense. Raises UserError for anything else."""
    value = read(path, do)
    with parsing(path, do):
        array = value.dense() if isinstance(value, ScipyMatrix) else value
        if not isinstance(array, np.ndarray) or array.ndim != 2:
            raise UserError(f"{printable(path)} holds no matrix.", do=do)
        return array


def read_saved(path: Path, do: str) -> dict[str, Array]:
    """The arrays of a dict that `torch.save` wrote: tensors, or NumPy arrays (as OGB has them). Raises UserError."""
    import torch

    with parsing(path, do):
        try:
            table = torch.load(path, weights_only=True, map_location="cpu")
        except Exception:  # it holds more than tensors, or is damaged: read below
            table = _saved_arrays(path)
        return {str(name): np.asarray(value) for name, value in table.items()}


def _saved_arrays(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return _read(archive.open(name))
    with path.open("rb") as file:
        value = _read(file)
        for _ in range(3 if value == _TORCH_MAGIC else 0):  # magic number, protocol, system; then what was saved
            value = _read(file)
        return value
