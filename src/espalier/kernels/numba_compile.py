"""Compilation of CPU kernels: numba with explicit signatures, a cache on disk, TBB's threads and torch's thread count.

Importing this imports numba; only modules of kernels do, and they are imported when a kernel first runs.

- Only the threading layer `tbb` survives forks and calls from several threads (after GNU OpenMP a forked child dies,
  the workqueue layer aborts). numba finds it only if the library is loaded already: the wheel puts it where the
  linker does not look. Without TBB, kernels run on one thread. A layer that the user chose or started is kept.
- The cache on disk is keyed by the source file of the kernel alone. Functions that a kernel calls (`njit`, `intrinsic`,
  `emitted`) stand in its own file, or their modules are named in `jit(uses=...)`: else a change there would not be
  noticed.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.core.sigutils import normalize_signature
from numba.np.numpy_support import as_dtype
from numba.np.ufunc import parallel

Body = TypeVar("Body", bound=Callable[..., Any])

njit: Callable[[Body], Body] = numba.njit
"""For functions that kernels call: compiled into them."""
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.extending.intrinsic
"""For functions that write LLVM's code themselves."""


def _load_tbb() -> bool:
    """True when numba will find TBB, or somebody already chose a threading layer."""
    if numba.config.THREADING_LAYER != "default" or _layer_runs():
        return True
    try:
        files = importlib.metadata.files("tbb") or []
        ctypes.CDLL(str(next(file for file in files if file.name.startswith("libtbb.so.12")).locate()))
        importlib.import_module("numba.np.ufunc.tbbpool")
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError, ImportError):
        return False
    numba.config.THREADING_LAYER = "tbb"
    return True


def _layer_runs() -> bool:
    try:
        numba.threading_layer()
    except ValueError:  # none is started
        return False
    return True


_PARALLEL = _load_tbb()


def _join_start() -> None:
    """Before a fork. TBB's threads are ended for it, and the empty task with which numba starts them is lost where none
    has taken it yet: numba would wait for it without end when the process ends."""
    if parallel._is_initialized and numba.threading_layer() == "tbb":
        wait = importlib.import_module("numba.np.ufunc.tbbpool").synchronize
        ctypes.CFUNCTYPE(None)(wait)()


os.register_at_fork(before=_join_start)
_COMPILING = threading.RLock()
"""Two threads that call a kernel for the first time compile it once."""


@dataclass(frozen=True)
class _Options:
    parallel: bool
    fastmath: bool
    uses: tuple[ModuleType, ...]


class Kernel:
    """A function that numba compiles at its first call, or loads from its cache. Has state: the compiled code.

    Tensors among the arguments are passed as the NumPy arrays they share memory with (no copy, no autograd; numba
    refuses, by a TypeError, dtypes and strides that no signature names).
    """

    def __init__(self, body: Callable[..., Any], signatures: tuple[str, ...], options: _Options) -> None:
        self.body = body
        self.__name__, self.__doc__ = body.__name__, body.__doc__
        self._options = replace(options, parallel=options.parallel and _PARALLEL)
        self._place, self._signatures = _by_dtype(signatures)
        self._compiled: dict[Any, Any] = {}
        self._qualname = body.__qualname__

    def compile(self) -> None:
        """Makes the code for all signatures, which otherwise waits for the first call with each dtype."""
        for dtype in self._signatures:
            self._code(dtype)

    def _code(self, dtype: Any) -> Any:
        """The code for the signatures of that dtype: from the cache on disk, or 0.3 to 1 s for each."""
        with _COMPILING:
            if dtype not in self._compiled:
                # The name is part of the cache's key. Each dtype has an index of its own: two processes that add to
                # one at the same time could give their code the same file.
                self.body.__qualname__ = f"{self._qualname}_{_key(self._options)}_{dtype}"
                self._compiled[dtype] = numba.njit(
                    self._signatures[dtype],
                    cache=True,
                    nogil=True,
                    error_model="numpy",
                    parallel=self._options.parallel,
                    fastmath=self._options.fastmath,
                )(self.body)
        return self._compiled[dtype]

    @cached_property
    def direct(self) -> Callable[..., Any]:
        """The code of a kernel with one signature and one thread, for NumPy arrays and numbers of exactly its types.

        A call takes 0.4 µs: nothing is converted, and no signature is looked for.
        """
        assert not self._options.parallel
        ((dtype, _),) = self._signatures.items()
        (compiled,) = self._code(dtype).overloads.values()
        return compiled.entry_point

    def __call__(self, *arguments: Any) -> Any:
        """Runs on as many threads as torch would use here."""
        given = [argument if isinstance(argument, np.ndarray) else _plain(argument) for argument in arguments]
        dtype = None if self._place is None else getattr(given[self._place], "dtype", None)
        run = self._compiled.get(dtype)
        if run is None:
            run = self._code(dtype if dtype in self._signatures else next(iter(self._signatures)))
        if self._options.parallel:
            numba.set_num_threads(threads())
        return run(*given)


def _by_dtype(signatures: tuple[str, ...]) -> tuple[int | None, dict[Any, list[str]]]:
    """(the first argument whose arrays have different dtypes, the signatures by that dtype); None: there is none."""
    types = [normalize_signature(signature)[0] for signature in signatures]
    for place, kinds in enumerate(zip(*types, strict=True)):
        if all(isinstance(kind, numba.types.Array) for kind in kinds) and len({kind.dtype for kind in kinds}) > 1:
            signatures_by_dtype: dict[Any, list[str]] = {}
            for signature, kind in zip(signatures, kinds, strict=True):
                signatures_by_dtype.setdefault(as_dtype(kind.dtype), []).append(signature)
            return place, signatures_by_dtype
    return None, {None: list(signatures)}


def _plain(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    if argument.requires_grad or argument._is_view():
        return np.asarray(_Memory(argument))
    return argument.numpy()


class _Memory:
    """A tensor's memory as NumPy reads it. `Tensor.numpy` would forbid for good that its storage is resized, which a
    sharded parameter's is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # lives as long as the array
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": _typestr(tensor.dtype),
            "shape": tuple(tensor.shape),
            "strides": tuple(tensor.element_size() * stride for stride in tensor.stride()),
        }


@cache
def _typestr(dtype: torch.dtype) -> str:
    return str(torch.empty(0, dtype=dtype).numpy().dtype.str)


def jit(
    *signatures: str, parallel: bool = False, fastmath: bool = False, uses: tuple[ModuleType, ...] = ()
) -> Callable[[Callable[..., Any]], Kernel]:
    """Makes the decorated body a `Kernel`.

    Args:
        signatures: of numba, return type first or left out: `"(float32[:, ::1], int64, int64[:, ::1])"`. One that
            says `real` stands for two: with float32 and with float64 in its place.
        parallel: the body has loops over `numba.prange`, and they may share its iterations out to threads. A body
            must give the same result for every number of threads.
        fastmath: sums may be reordered, and no NaN or infinity occurs.
        uses: other modules whose functions are compiled into this one.
    """

    def make(body: Callable[..., Any]) -> Kernel:
        each = dict.fromkeys(
            signature.replace("real", kind) for signature in signatures for kind in ("float32", "float64")
        )
        return Kernel(body, tuple(each), _Options(parallel, fastmath, uses))

    return make


def _key(options: _Options) -> str:
    """What numba leaves out of its cache's key: options, and the text of other modules."""
    texts = [Path(module.__file__ or "").read_bytes() for module in options.uses]
    return hashlib.sha256(b"".join([repr((options.parallel, options.fastmath)).encode(), *texts])).hexdigest()[:16]


def threads() -> int:
    """How many threads a parallel kernel uses here: torch's number, at most numba's pool."""
    return min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))


def emitted(result: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Makes an intrinsic of a function that writes LLVM code: it takes the builder and the values of the arguments.

    `result`: numba's type of what the function returns; None: that of the first argument.
    """

    def made(write: Callable[..., Any]) -> Any:
        def typed(typing: Any, *kinds: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                value = write(builder, *args)
                return context.get_dummy_value() if value is None else value

            return (kinds[0] if result is None else result)(*kinds), generate

        typed.__name__, typed.__doc__ = write.__name__, write.__doc__
        return counted(typed, len(inspect.signature(write).parameters))

    return made


def named(builder: Any, name: str, result: Any, *arguments: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """A call of LLVM's function of that name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments, fastmath=fastmath)


def in_all_lanes(builder: Any, scalar: Any, vector: Any) -> Any:
    """A vector of LLVM's type `vector` with `scalar` in every lane."""
    undefined, number = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    first_lane = builder.insert_element(undefined, scalar, number(0))
    return builder.shuffle_vector(first_lane, undefined, ir.Constant(ir.VectorType(number, vector.count), None))


def fetch_line(builder: Any, pointer: Any) -> None:
    """Asks for the cache line of a pointer to bytes, to be read, without waiting for it."""
    options = (ir.Constant(ir.IntType(32), option) for option in (0, 3, 1))
    named(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *options)


def counted(typed: Callable[..., Any], count: int) -> Any:
    """The intrinsic of `typed`, of `count` arguments with the typing context: numba wants them one by one."""
    named = [inspect.Parameter(f"p{k}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in range(count)]
    typed.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return intrinsic(typed)
