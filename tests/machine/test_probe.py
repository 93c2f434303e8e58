"""A probe is quick, leaves its caller as it was, and is kept until the hardware changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from espalier.machine import cluster as clusters
from espalier.machine import measure, probe, resource_limits
from espalier.machine.cluster import Cluster
from espalier.recipe.errors import RunFailed

GPU = {
    "cuda": [
        {
            "name": name,
            "memory": 80 * 2**30,
            "memory_bandwidth": 1.8e12,
            "rates": [["product", "fp32", 64, 64, 64, 1, 1, 1e12], ["product", "bf16", 64, 64, 64, 1, 1, 2e14]],
            "dispatch": 5e-6,
        }
        for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3060 Ti")
    ],
    "peer": 2.5e11,
    "link": None,
    "notes": ["a note"],
}


def test_a_quick_probe_takes_seconds_and_tells_what_it_does(machine: dict[str, Any]) -> None:
    seconds, said = machine["seconds"], machine["said"]
    assert machine["cpu_seconds"] < 2000 * machine["loop"]  # about 700, whatever else the machine does
    assert said == [] if seconds < probe.QUIET else said[-1] == "reading and writing the disk"


def test_a_probe_measures_what_planners_read(machine: dict[str, Any]) -> None:
    node = clusters.loads(machine["text"]).nodes[0]
    assert node.cores == resource_limits.cores()
    assert node.memory == resource_limits.memory()
    assert node.inside.bandwidth > 1e6
    if node.device.kind == "cpu":
        assert set(node.device.flops) == {"fp32", "bf16", "fp64"}
        assert not node.device.peak
        measured = {(rate.processes, rate.threads) for rate in node.device.rates}
        assert measured == set(measure.settings(node.cores))
        assert node.device.dispatch > 0
        assert node.device.runtime > 2**20
    assert node.disks[0].write > 0


def test_a_probed_cluster_survives_its_file(machine: dict[str, Any]) -> None:
    found = clusters.loads(machine["text"])
    assert clusters.loads(clusters.dumps(found)) == found
    assert clusters.dumps(found) == machine["text"]


def test_the_caller_is_left_as_it_was(machine: dict[str, Any]) -> None:
    assert machine["threads"] == 1
    assert not machine["cuda"]


@pytest.mark.parametrize("cores", [1, 2, 3, 6, 7, 8, 16, 64, 96])
def test_settings_use_all_cores_and_no_more(cores: int) -> None:
    found = measure.settings(cores)
    assert found[0] == (1, 1)
    assert len(found) == len(set(found)) <= 4
    assert all(processes * threads == cores for processes, threads in found[1:])


# --- the cache ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return probe.cache_file().parent


def written(machine: str) -> Cluster:
    text = f'machine = "{machine}"\n[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "1GiB"\n'
    made = clusters.loads(text)
    probe.save(made)
    assert probe.cache_file().exists()
    return made


def test_a_kept_probe_comes_back(cache: Path) -> None:
    assert probe.cached() is None
    made = written(probe.identity())
    assert probe.cached() == made
    assert probe.ready() == made
    assert [file.name for file in cache.iterdir()] == [probe.cache_file().name]


def test_a_probe_of_a_busy_machine_does_not_replace_that_of_a_quieter_one() -> None:
    said: list[str] = []
    quiet, less, more = (
        clusters.loads(f'busy = {busy}\n[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"')
        for busy in (0.1, 0.6, 1.5)
    )
    assert clusters.loads(clusters.dumps(more)).busy == 1.5
    assert probe.better(more, quiet, said.append) is quiet
    assert "used 1.5 cores" in said[0]
    assert probe.better(more, less, said.append) is less
    assert probe.better(less, more, said.append) is less
    assert probe.better(quiet, less, said.append) is quiet
    assert probe.better(more, None, said.append) is more
    assert len(said) == 2


def test_a_probe_says_that_the_machine_was_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(probe, "_measured", lambda cores, seconds, say: GPU)
    monkeypatch.setattr(resource_limits, "busy", lambda seconds: 1.2)
    monkeypatch.chdir(tmp_path)
    found = probe.ready(say=said.append)
    assert found.busy == 1.2
    assert "other programs used 1.2" in said[-1]
    assert "other programs used 1.2" in found.notes[-1]


def test_a_probe_of_other_hardware_is_measured_anew() -> None:
    said: list[str] = []
    written("a machine with 1 core")
    assert probe.cached(say=said.append) is None
    assert "other hardware (a machine with 1 core)" in said[0]


def test_a_damaged_file_is_said_and_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    probe.cache_file().parent.mkdir(parents=True)
    probe.cache_file().write_bytes(b"\x00[[nodes]")
    monkeypatch.setattr(probe, "_measured", lambda cores, seconds, say: GPU)
    monkeypatch.chdir(tmp_path)
    found = probe.ready(say=said.append)
    assert "cannot be used" in said[0]
    assert probe.cached() == found


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("")
    made = written(probe.identity())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "inside"))
    probe.save(made, say=said.append)
    assert probe.cached() is None
    assert "cannot be kept" in said[0]


def test_the_cache_lies_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert probe.cache_folder() == tmp_path / "espalier"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says to ignore it
    assert probe.cache_folder() == Path.home() / ".cache" / "espalier"


def test_identity_names_what_a_measurement_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = probe.identity()
    assert resource_limits.processor() in before
    assert "torch 2" in before
    for name, value in (("cores", 999), ("memory", 1), ("gpus", ("NVIDIA L4",)), ("processor", "other")):
        with monkeypatch.context() as patch:
            patch.setattr(resource_limits, name, lambda value=value: value)
            assert probe.identity() != before


# --- GPUs and failures -------------------------------------------------------------------------------------------


def test_gpus_are_grouped_named_and_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_measured", lambda cores, seconds, say: GPU)
    cluster = probe.probe(disk=tmp_path)
    assert [(table.device.name, table.devices) for table in cluster.nodes] == [
        ("A100-80GB", 2),
        ("RTX 3060 Ti", 1),
    ]
    assert [(place.node, place.slot) for place in cluster.devices()] == [(0, 0), (0, 1), (0, 2)]
    assert cluster.nodes[0].device.flops == {"fp32": 1e12, "bf16": 2e14}
    assert cluster.link(0, 1).bandwidth == 2.5e11
    assert "a note" in cluster.notes
    assert clusters.loads(clusters.dumps(cluster)) == cluster


@pytest.mark.parametrize(
    ("driver", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 D"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A800 80GB PCIe", "NVIDIA A800 80GB PCIe"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX 3060 Laptop"),
        ("NVIDIA A10G", "A10G"),
    ],
)
def test_drivers_names_are_matched_only_where_the_figures_hold(driver: str, known: str) -> None:
    assert probe._named(driver) == known


def test_a_failing_measurement_is_told_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'libfoo.so is missing' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(RunFailed, match=r"exit 3.*\n.*libfoo.so is missing"):
        probe.probe(disk=tmp_path)


def test_a_measurement_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(probe, "TIMEOUT", 0.3)
    with pytest.raises(RunFailed, match="no answer within"):
        probe.probe(disk=tmp_path)
