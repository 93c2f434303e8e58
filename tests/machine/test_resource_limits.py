"""Cores and memory are what the kernel grants this process, not what the machine has."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from espalier.machine import resource_limits


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the file system of a machine of which this process may use four processors."""
    monkeypatch.setattr(resource_limits, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: FOUR)
    return tmp_path


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal:       16384 kB\nMemFree: 1 kB\n", "proc/self/cgroup": "0::/\n"}
FOUR = frozenset(range(4))


def test_without_limits_the_whole_machine_is_granted(root: Path) -> None:
    write(root, MACHINE)
    assert resource_limits.memory() == 16384 * 1024
    assert resource_limits.cores() == 4


def test_a_v2_limit_of_any_group_above_holds(root: Path) -> None:
    write(root, MACHINE | {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "4194304\n", "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n",
    })  # fmt: skip
    assert resource_limits.memory() == 4194304
    assert resource_limits.cores() == 2  # one and a half cores' worth


def test_a_v1_limit_holds(root: Path) -> None:
    write(root, MACHINE | {
        "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "8388608\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert resource_limits.memory() == 8388608
    assert resource_limits.cores() == 1


def test_inside_a_container_the_mount_s_own_root_holds(root: Path) -> None:
    """The group's path in /proc is the host's; only the root of the mount is visible."""
    write(root, MACHINE | {
        "proc/self/cgroup": "0::/../../kubepods/pod1\n", "sys/fs/cgroup/memory.max": "1048576\n",
    })  # fmt: skip
    assert resource_limits.memory() == 1048576


def test_threads_of_one_core_count_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 2},{cpu % 2 + 2}" for cpu in FOUR
    }
    write(root, MACHINE | pairs)
    assert resource_limits.cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3})
    assert resource_limits.cores() == 1


def test_models_are_read_from_the_kernel(root: Path) -> None:
    assert resource_limits.gpus() == ()
    write(root, {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 3GHz\n",
        "proc/driver/nvidia/gpus/0000:01/information": "Model: \t NVIDIA L4\nIRQ: 3\n",
    })  # fmt: skip
    assert resource_limits.processor() == "Some CPU @ 3GHz"
    assert resource_limits.gpus() == ("NVIDIA L4",)


def test_this_machine_grants_something() -> None:
    assert resource_limits.cores() >= 1
    assert resource_limits.memory() > 2**26


def test_free_memory_is_what_the_machine_or_a_control_group_leaves(root: Path) -> None:
    (root / "proc/self").mkdir(parents=True)
    assert resource_limits.free_memory() == 0
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 700 kB\n")
    assert resource_limits.free_memory() == 700 * 1024
    (root / "proc/self/cgroup").write_text("0::/box\n")
    box = root / "sys/fs/cgroup/box"
    box.mkdir(parents=True)
    (box / "memory.max").write_text("500000\n")
    (box / "memory.current").write_text("200000\n")
    assert resource_limits.free_memory() == 300_000
    (box / "memory.max").write_text("max\n")
    assert resource_limits.free_memory() == 700 * 1024


@pytest.mark.parametrize(
    ("passed", "expected"), [((0, 0, 0, 800), 0.0), ((100, 50, 50, 600), 1.0), ((900, 0, 0, 0), 4.0)]
)
def test_busy_cores_are_those_that_others_leave_no_room_on(
    root: Path, monkeypatch: pytest.MonkeyPatch, passed: tuple[int, ...], expected: float
) -> None:
    write(root, MACHINE | {"proc/stat": "cpu  5 5 5 5 0 0 0 0 0 0\n"})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    later = " ".join(str(5 + one) for one in passed)
    monkeypatch.setattr(time, "sleep", lambda seconds: write(root, {"proc/stat": f"cpu  {later} 0 0 0 0 0 0\n"}))
    assert resource_limits.busy(0.1) == expected


def test_a_core_that_others_use_does_not_matter_where_enough_are_free(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, MACHINE | {"proc/stat": "cpu  0 0 0 0 0 0 0 0 0 0\n"})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: frozenset({0, 1}))
    monkeypatch.setattr(time, "sleep", lambda seconds: write(root, {"proc/stat": "cpu  50 0 0 50 0 0 0 0 0 0\n"}))
    assert resource_limits.busy(0.1) == 0


def test_processes_killed_for_want_of_memory_are_those_that_the_kernel_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(resource_limits, "ROOT", tmp_path)
    assert resource_limits.oom_kills() is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("pgfault 12\noom_kill 3\n")
    assert resource_limits.oom_kills() == 3
