"""Resource limits: cores and memory that affinity and control groups (v1 and v2) allow this process. Linux only."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from espalier.recipe import units
from espalier.recipe.errors import UserError

ROOT = Path("/")
SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
"""The file that names the logical processors of one physical core."""


def cores() -> int:
    """Physical cores in this process's affinity, less what a control group's time quota takes away; at least one."""
    least = float(_physical(os.sched_getaffinity(0)))
    for folder in _groups("cpu"):
        both = (_text(folder / "cpu.max") or "").split()
        old, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if len(both) == 2 and both[0] != "max":
            least = min(least, int(both[0]) / int(both[1]))
        if old and period and old > 0:
            least = min(least, old / period)
    return max(1, math.ceil(least))


def _physical(cpus: Iterable[int]) -> int:
    """How many physical cores these logical processors are."""
    return len({_text(ROOT / SIBLINGS.format(cpu)) or str(cpu) for cpu in cpus})


def busy(seconds: float) -> float:
    """How many of this process's cores other programs use, on average over `seconds` in which this one sleeps."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    passed = [new - old for old, new in zip(before, after, strict=True)]
    idle = sum(passed[3:5]) / max(1, sum(passed))  # waiting for a disk is idle
    free = idle * _physical(range(os.cpu_count() or 1))
    return max(0.0, cores() - free) if sum(passed) else 0.0


def _ticks() -> list[int]:
    """Time of all processors by state: user, nice, system, idle, waiting, interrupts, stolen."""
    line = (_text(ROOT / "proc/stat") or "cpu").splitlines()[0]
    return [int(share) for share in line.split()[1:9]]


def memory() -> int:
    """Bytes this process may use: the machine's memory or the smallest limit of its control groups."""
    total = _field(ROOT / "proc/meminfo", "MemTotal")
    whole = int(total.split()[0]) * 1024 if total else 2**63 - 1
    files = (folder / name for folder in _groups("memory") for name in ("memory.max", "memory.limit_in_bytes"))
    return min([whole, *(limit for file in files if (limit := _number(file)) is not None)])


def address_space() -> float:
    """Bytes of address space this process may still take (`RLIMIT_AS`, `ulimit -v`); infinite without a limit."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = _field(ROOT / "proc/self/status", "VmSize")
    return math.inf if most == resource.RLIM_INFINITY or not used else max(0.0, most - int(used.split()[0]) * 1024.0)


def free_memory() -> int:
    """Bytes this process may still take: the machine's `MemAvailable`, or what a control group leaves (its page cache
    counts as taken); 0 where unknown."""
    available = _field(ROOT / "proc/meminfo", "MemAvailable")
    left = [int(available.split()[0]) * 1024] if available else [0]
    for folder in _groups("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most, now = _number(folder / limit), _number(folder / used)
            left += [most - now] if most is not None and now is not None else []
    return max(0, min(left))


def oom_kills() -> int | None:
    """Processes that the kernel has killed since it started for want of memory; None where it does not say."""
    rows = (line.split() for line in (_text(ROOT / "proc/vmstat") or "").splitlines())
    return next((int(row[1]) for row in rows if row[0] == "oom_kill"), None)


def refuse_large(what: str, needed: float, do: str = "a smaller one, or more memory") -> None:
    """Raises UserError where `needed` bytes are more than half of the memory, and more than is free of it (files that
    the system caches count as taken, so that alone says little). Every reader of files of others asks first."""
    room = max(free_memory(), memory() // 2)
    if needed > room:
        raise UserError(
            f"{what} does not fit into memory.",
            why=f"it takes {units.show_size(needed)}, and {units.show_size(room)} are free",
            do=do,
        )


def processor() -> str:
    """The processor's model name, or `unknown`."""
    return _field(ROOT / "proc/cpuinfo", "model name") or "unknown"


def gpus() -> tuple[str, ...]:
    """Model names of the NVIDIA devices whose driver is loaded; read without touching CUDA."""
    gpu_files = sorted((ROOT / "proc/driver/nvidia/gpus").glob("*/information"))
    return tuple(_field(file, "Model") or "unknown" for file in gpu_files)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control group for `controller` and of all groups above it, v1 and v2.

    Inside a container the path in /proc may lie outside the mount; the mount's own root then holds the limits, and it
    is always among the folders.
    """
    base = ROOT / "sys/fs/cgroup"
    for line in (_text(ROOT / "proc/self/cgroup") or "0::/").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        mounts = [base / controller, base / controllers] if controllers else [base, base / "unified"]
        steps = [part for part in path.split("/") if part not in ("", "..")]
        for mount in mounts:
            yield from (mount.joinpath(*steps[:depth]) for depth in range(len(steps), -1, -1))


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text and text.lstrip("-").isdigit() else None


def _field(file: Path, name: str) -> str | None:
    for line in (_text(file) or "").splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
