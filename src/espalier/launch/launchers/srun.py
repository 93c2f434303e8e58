"""Ranks started by Slurm's srun, one per task: rank, world size and hosts come from SLURM_*, and the rendezvous is on
the first host.

Only a step that srun started with more than one task is taken for ranks: a batch script itself, and a single task, are
places to supervise ranks from. What mpiexec starts inside an allocation is `mpiexec`'s.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess

from espalier.comm.rendezvous_wait import known_addresses
from espalier.launch.launchers.torchrun import master_port, number
from espalier.recipe.errors import UserError
from espalier.train.rank_spec import RankSpec

_MPIEXEC = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""Set by mpiexec, also where it starts its daemons by srun, whose variables their children inherit."""
_PORTS = (10_000, 20_000)
"""First port and how many: below those that Linux gives out by itself (32768 and more)."""
_ASKING = 20.0
"""Seconds that scontrol may take."""


def place() -> RankSpec | None:
    """This process's place by srun's variables, or None when srun has not started several tasks.

    MASTER_ADDR and MASTER_PORT, where they are set, say where the ranks meet.

    Raises UserError when the variables contradict one another.
    """
    if "SLURM_STEP_ID" not in os.environ or "SLURM_PROCID" not in os.environ:
        return None
    if any(name in os.environ for name in _MPIEXEC):
        return None
    world = number("SLURM_STEP_NUM_TASKS", number("SLURM_NTASKS", 1))
    if world < 2:
        return None
    rank = number("SLURM_PROCID")
    local = number("SLURM_LOCALID", 0)
    if not 0 <= rank < world:
        raise UserError(
            f"SLURM_PROCID={rank} with {world} tasks.",
            why="srun numbers tasks from 0 to their number minus one",
            do="start the ranks with srun --ntasks=N, or unset SLURM_PROCID",
        )
    return RankSpec(
        rank=rank,
        world=world,
        local_rank=local,
        threads=_threads(),
        attempt=number("SLURM_RESTART_COUNT", 0),
        host=os.environ.get("MASTER_ADDR") or _first_host(),
        port=master_port() if "MASTER_PORT" in os.environ else _port(),
        source="MASTER_ADDR" if os.environ.get("MASTER_ADDR") else "SLURM_STEP_NODELIST",
        serves=rank == 0,
    )


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts: `gpu[03-05,7],x1` is gpu03.

    Raises UserError where that names none.
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]  # at a comma that stands in no brackets
    expanded = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
    if not re.fullmatch(r"[\w.:-]+", expanded):
        raise UserError(
            f"Slurm's list of hosts {nodes!r} names no first host.", do="set MASTER_ADDR to the host of the first task"
        )
    return expanded


def _first_host() -> str:
    if number("SLURM_STEP_NUM_NODES", number("SLURM_NNODES", 1)) == 1:
        return "127.0.0.1"
    return _address(first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")))


def _address(node: str) -> str:
    """A host name for Slurm's name of a node: the same where it has an address, else Slurm's NodeAddr.

    Raises UserError where neither can be found: ranks would wait for one another in vain.
    """
    if known_addresses(node):
        return node
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = ["scontrol", "show", "node", node, "--oneliner"]
        answer = subprocess.run(shown, capture_output=True, text=True, timeout=_ASKING, check=True).stdout
        match = re.search(r"\bNodeAddr=([\w.:-]+)", answer)
        if match and known_addresses(match[1]):
            return match[1]
    raise UserError(
        f"No address is known for {node}, the first host of this job.",
        why="neither the name service nor `scontrol show node` has one",
        do="set MASTER_ADDR to an address of the first host",
    )


def _port() -> int:
    """The same on all tasks of a step, another for another job or step."""
    first, count = _PORTS
    return first + (7 * number("SLURM_JOB_ID", 0) + number("SLURM_STEP_ID", 0)) % count


def _threads() -> int:
    """CPUs of this task: those it is bound to, else its share of the node's."""
    mine = len(os.sched_getaffinity(0))
    if mine < number("SLURM_CPUS_ON_NODE", 0):
        return mine
    return max(1, mine // tasks_here(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"), number("SLURM_NODEID", 0)))


def tasks_here(per_node: str, node: int) -> int:
    """Tasks of the node-th node by Slurm's list: `2(x3),1` is 2 on each of three nodes and 1 on the fourth."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    return 1
