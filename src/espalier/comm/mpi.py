"""The codecs round mpi4py's collectives, for arrays, without torch.distributed: `allreduce(comm, array, codec="int8")`.

The exchanges are those of `compressed_collectives`: each contribution is encoded once, added up in full precision by
the owner of its part, and the sum encoded once more, so that all ranks end with the same bits. Needs
`espalier-train[mpi]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.comm.base import Codec, unbooked
from espalier.comm.c10d_arguments import shares
from espalier.comm.codecs import codec as codec_of
from espalier.comm.compressed_collectives import CodedCollectives
from espalier.recipe.errors import PeerLost, UserError, missing_extra

TIMEOUT = 60.0
"""Seconds any wait for another rank may take."""
POLL = 50e-6
"""Seconds between two looks at what is under way: MPI moves large messages only while somebody asks."""

Array = NDArray[Any]


def allreduce(comm: Any, array: Array, codec: str | Codec = "int8", residual: Array | None = None) -> Array:
    """The sum of all ranks' `array`; every rank gets the same bits.

    Args:
        comm: an mpi4py communicator; all its ranks call this alike.
        array: float32, float64 or float16, any shape; not changed.
        codec: see `comm.codecs.codec`.
        residual: float32 (float64 for float64) of the same size, zeros at first, changed in place: what a lossy codec
            loses is kept there and added to what is sent next. None: no feedback.

    Raises:
        UserError: mpi4py is not installed, the dtype or the residual does not fit, or the ranks' codecs differ.
        PeerLost: a rank did not answer in time. RunFailed: a message was damaged.
    """
    summed = np.array(array, order="C")
    feedback = None if residual is None else _residual(residual, summed)
    _run(comm, codec, lambda through: through.all_reduce(_tensor(summed), feedback, False))
    return summed


def reduce_scatter(comm: Any, array: Array, codec: str | Codec = "int8", residual: Array | None = None) -> Array:
    """Rank r gets the sum of all ranks' r-th part of `array` along its first dim, which the ranks divide.

    Arguments and errors as of `allreduce`; a UserError, too, where the ranks do not divide the first dim.
    """
    parts, size = _parts(comm, array)
    feedback = None if residual is None else _residual(residual, array)
    part = np.empty((size, *array.shape[1:]), array.dtype)
    _run(comm, codec, lambda through: through.reduce_scatter(_tensor(part), _tensor(parts), feedback, False))
    return part


def allgather(comm: Any, array: Array, codec: str | Codec = "split") -> Array:
    """[ranks, *shape] all ranks' `array`, of one shape on all; one's own as the others see it. Errors as of
    `allreduce`."""
    gathered = np.empty((comm.Get_size(), *array.shape), array.dtype)
    _run(comm, codec, lambda through: through.all_gather(_tensor(gathered), _tensor(np.ascontiguousarray(array))))
    return gathered


def alltoall(comm: Any, array: Array, codec: str | Codec = "split") -> Array:
    """Rank r gets every rank's r-th part of `array` along its first dim, which the ranks divide. Errors as of
    `reduce_scatter`."""
    parts, _ = _parts(comm, array)
    received = np.empty_like(parts)
    give, take = (shares(_tensor(buffer), None, comm.Get_size()) for buffer in (parts, received))
    _run(comm, codec, lambda through: through.all_to_all(take, give))
    return received


def _run(comm: Any, codec: str | Codec, start: Callable[[CodedCollectives], Any]) -> None:
    """Begins one collective on a communicator of its own and waits for it."""
    ranks = comm.Get_size()
    place = (comm.Get_rank(), ranks)
    chosen = codec_of(codec)
    if ranks == 1:
        through = CodedCollectives(chosen, None, place, "mpi", (0,), _limit)
        start(through)(unbooked).wait()
        return
    inner = MpiMessages(comm)
    through = CodedCollectives(chosen, inner, place, "mpi", tuple(range(ranks)), _limit)
    try:
        start(through)(unbooked).wait()
    finally:
        through.close()


class MpiMessages:
    """The messages of a communicator with the methods of a Gloo group. Has state: what is under way, and the thread
    that makes MPI move it."""

    def __init__(self, comm: Any) -> None:
        self._comm = _apart(comm)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> MpiRequest:
        """Begins to send one tensor of bytes or values."""
        return MpiRequest(self._comm.Isend(_bytes(tensors[0]), dest=peer, tag=tag), peer, tensors[0])

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> MpiRequest:
        """Begins to receive one tensor."""
        return MpiRequest(self._comm.Irecv(_bytes(tensors[0]), source=peer, tag=tag), peer, tensors[0])


class MpiRequest:
    """A message under way; holds its tensor. Has state: whether it is done."""

    def __init__(self, request: Any, peer: int, tensor: Tensor) -> None:
        self._request, self._peer, self._tensor = request, peer, tensor

    def wait(self, timeout: timedelta) -> bool:
        """Returns when it is done. Raises PeerLost at the deadline."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._request.Test():
            time.sleep(POLL)
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"Rank {self._peer} of the communicator did not answer within {timeout.total_seconds():g} s.",
                    do="look at that rank's output; all ranks must call the same collective",
                )
        return True


class MpiProgress:
    """Keeps MPI moving while the block computes: with many MPIs a large message begins only when somebody looks.

    Used once. Raises UserError where mpi4py is not installed or MPI was started for one thread. Has state: its thread.

    >>> with Progress(comm):  # doctest: +SKIP
    ...     request = comm.Iallreduce(MPI.IN_PLACE, array)
    ...     compute()
    >>> request.Wait()  # doctest: +SKIP
    """

    def __init__(self, comm: Any) -> None:
        _threaded()
        self._comm, self._stop = comm, Event()
        self._thread = Thread(target=self._run, name="espalier-mpi", daemon=True)

    def __enter__(self) -> MpiProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(POLL):
            self._comm.Iprobe()


def _threaded() -> Any:
    """mpi4py's MPI, which several threads may call."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise missing_extra("mpi4py", "mpi", "espalier.comm.mpi") from None
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError(
            "This MPI was started for one thread, and codecs use another.",
            do="mpi4py.rc.thread_level = 'multiple' before `from mpi4py import MPI`",
        )
    return MPI


@cache
def _key(mpi: Any) -> int:
    """The attribute of a communicator that holds the one for our messages; it goes when the communicator goes."""
    return mpi.Comm.Create_keyval(delete_fn=lambda comm, key, apart: apart.Free())


def _apart(comm: Any) -> Any:
    """A communicator of the same ranks, so that nobody else's messages are taken for ours."""
    key = _key(_threaded())
    copy = comm.Get_attr(key)
    if copy is None:
        copy = comm.Dup()
        comm.Set_attr(key, copy)
    return copy


def _limit() -> timedelta:
    return timedelta(seconds=TIMEOUT)


def _tensor(array: Array) -> Tensor:
    """The same memory."""
    if array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4, 8):
        raise UserError(f"The array has dtype {array.dtype}.", do="float32, float64 or float16")
    return torch.from_numpy(array)


def _bytes(tensor: Tensor) -> Array:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _residual(residual: Array, array: Array) -> Tensor:
    wanted = np.float64 if array.dtype == np.float64 else np.float32
    if residual.dtype != wanted or residual.size != array.size or not residual.flags.c_contiguous:
        raise UserError(
            f"The residual has dtype {residual.dtype} and {residual.size} values.",
            do=f"np.zeros({array.size}, np.{np.dtype(wanted).name})",
        )
    return torch.from_numpy(residual.reshape(-1))


def _parts(comm: Any, array: Array) -> tuple[Array, int]:
    """The array, and rows of a part."""
    ranks = comm.Get_size()
    if array.ndim == 0 or array.shape[0] % ranks:
        raise UserError(f"{ranks} ranks do not divide an array of shape {array.shape}.", do="pad its first dim")
    return np.ascontiguousarray(array), array.shape[0] // ranks
