"""Ranks started by mpiexec (MPICH, Intel MPI, MVAPICH, Open MPI): rank from the environment, rendezvous by mpi4py.

Rank 0 listens at a port that is free and tells the others where, by MPI. Where MASTER_ADDR and MASTER_PORT are set they
meet there, as under torchrun, and mpi4py is not needed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from espalier.launch.launchers.torchrun import master_port, number
from espalier.machine import network_interface
from espalier.recipe.errors import UserError, missing_extra
from espalier.train.rank_spec import RankSpec

_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Rank, number of ranks, and both on this host: Open MPI; MVAPICH2; MPICH's Hydra, which Intel MPI has too."""


class _Meeting(NamedTuple):
    """Where the store is, and the descriptor that this process listens on (-1: another does)."""

    host: str
    port: int
    listen_fd: int


def place() -> RankSpec | None:
    """This process's place by the variables of an mpiexec, or None when none has set them. Same call on every rank.

    Raises UserError when they contradict one another, when mpi4py is needed and not installed, or when it is for
    another MPI than the one that started the ranks.
    """
    names = next((names for names in _VARIABLES if names[0] in os.environ and names[1] in os.environ), None)
    if names is None:
        return None
    rank = number(names[0])
    world = number(names[1])
    if not 0 <= rank < world:
        raise UserError(
            f"{names[0]}={rank} with {names[1]}={world}.", why="ranks are numbered from 0 to the world size minus one"
        )
    local = number(names[2], 0)
    local_ranks = max(1, number(names[3], 1))
    met = _given() or _met(rank, world, local_ranks)
    return RankSpec(
        rank=rank,
        world=world,
        local_rank=local,
        threads=max(1, len(os.sched_getaffinity(0)) // local_ranks),
        host=met.host,
        port=met.port,
        source="MASTER_ADDR" if "MASTER_ADDR" in os.environ else "rank 0's address, told by MPI",
        serves=rank == 0,
        listen_fd=met.listen_fd,
    )


def _given() -> _Meeting | None:
    """What MASTER_ADDR and MASTER_PORT say; None when neither is set."""
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    if not given:
        return None
    if len(given) == 1:
        other = "MASTER_PORT" if given[0] == "MASTER_ADDR" else "MASTER_ADDR"
        raise UserError(f"{given[0]} is set, and {other} is not.", do=f"set {other} too, or neither and install mpi4py")
    return _Meeting(os.environ["MASTER_ADDR"], master_port(), -1)


@cache
def _met(rank: int, world: int, local_ranks: int) -> _Meeting:
    """The ranks agree by MPI where their store is."""
    comm = _world(world) if world > 1 else None
    meeting: tuple[Sequence[str], int] = ((), 0)
    listen_fd = -1
    if rank == 0:
        listener = socket.create_server(("", 0), backlog=1024)
        local_addresses = [address.address for address in network_interface.addresses()]
        meeting = (["127.0.0.1"] if local_ranks == world else local_addresses, listener.getsockname()[1])
        listen_fd = listener.detach()
    addresses, port = meeting if comm is None else comm.bcast(meeting, 0)
    return _Meeting("127.0.0.1" if rank == 0 else _answering(addresses, port), port, listen_fd)


def _world(world: int) -> Any:
    """MPI's communicator of all ranks."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no MPI library
        lacks = missing_extra("mpi4py", "mpi", "Meeting under mpiexec")
        do = f"{lacks.do}; or set MASTER_ADDR (rank 0's host) and MASTER_PORT (a free port) for all ranks"
        raise UserError(lacks.what, why=str(error).splitlines()[0], do=do) from None
    comm = MPI.COMM_WORLD
    if comm.Get_size() != world:
        raise UserError(
            f"mpiexec started {world} ranks, and mpi4py sees {comm.Get_size()}.",
            why=f"mpi4py uses another MPI: {MPI.Get_library_version().splitlines()[0].strip()}",
            do="start with that MPI's mpiexec, or set MASTER_ADDR and MASTER_PORT for all ranks",
        )
    return comm


def _answering(addresses: Sequence[str], port: int) -> str:
    """The first address that rank 0 answers at."""
    reached = network_interface.reach(addresses, port, "", None)
    if reached is not None:
        return reached[0]
    raise UserError(
        f"Rank 0 answers at none of its addresses ({', '.join(addresses)}), port {port}.",
        why="a firewall between the hosts, or hosts on separate networks",
        do="set MASTER_ADDR to an address of rank 0's host that others reach, and MASTER_PORT to an open port",
    )
