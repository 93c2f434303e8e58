"""What do I have? Measures this machine into a `Cluster` within a few seconds, and keeps the answer for next time.

Cores and memory are read from the kernel here; everything that needs PyTorch runs in a program of its own
(`machine.measure`), so that calling this changes nothing in the caller's process. Loads no torch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

from espalier.machine import cluster as clusters
from espalier.machine import resource_limits
from espalier.machine.cluster import Cluster, Copy, Device, Link, Node, Rate
from espalier.recipe.cache_dir import cache_folder, write_atomic
from espalier.recipe.errors import RunFailed, UserError

Say = Callable[[str], None]
Table = dict[str, Any]
QUIET = 2.0
"""Seconds before the first progress line: a quick probe says nothing."""
PRODUCT_SECONDS = 0.02
"""How long each product is measured."""
TIMEOUT = 120.0
"""Seconds after which the measuring program is stopped."""
LOOK_SECONDS = 0.1
"""How long other programs are watched before and after measuring."""
BUSY = 0.25
"""Cores: where other programs use more, what is measured is theirs too."""


def _silent(text: str) -> None:
    """Nobody is told."""


def probe(*, progress: Say = _silent, disk: str | Path | None = None) -> Cluster:
    """Measures this machine: cores, memory, matrix products, copies, loopback, the disk under `disk` (default: here).

    Takes about five seconds on two idle cores. `progress` gets a line now and then once two seconds are over. What
    could not be measured is in the cluster's `notes`. Raises RunFailed when measuring fails.
    """
    begin = time.monotonic()

    def say(text: str) -> None:
        if time.monotonic() - begin >= QUIET:
            progress(text)

    cores, memory = resource_limits.cores(), resource_limits.memory()
    before = resource_limits.busy(LOOK_SECONDS)
    result = _measured(cores, PRODUCT_SECONDS, say)
    from espalier.machine import disk as disks

    say("reading and writing the disk")
    disk_bandwidth, notes = disks.measure(Path(disk or "."))
    busy = round(max(before, resource_limits.busy(LOOK_SECONDS)), 2)
    if busy > BUSY:
        warning = f"other programs used {busy:.1f} of {cores} cores meanwhile: measure again when they have ended"
        notes = (*notes, f"{warning} (espalier probe)")
    inside = _inside(result)
    machine = identity()
    nodes = tuple(
        Node(device=device, devices=count, inside=inside, cores=cores, memory=memory, name=name,
             disks=(disk_bandwidth,) if disk_bandwidth is not None else ())
        for device, count, name in _devices(result, memory)
    )  # fmt: skip
    return Cluster(nodes=nodes, machine=machine, busy=busy, notes=(*result["notes"], *notes))


def ready(*, say: Say = _silent) -> Cluster:
    """This machine from the cache, else probed and cached; `say` gets what there is to tell."""
    cluster = cached(say=say)
    if cluster is None:
        cluster = probe(progress=say)
        save(cluster, say=say)
        if cluster.busy > BUSY:
            say(f"Note: {cluster.notes[-1]}.")
    return cluster


def better(measured: Cluster, stored: Cluster | None, say: Say) -> Cluster:
    """Of two measurements of one machine the newer, unless other programs used more of its cores meanwhile."""
    if stored is None or measured.busy <= max(BUSY, stored.busy):
        return measured
    say(
        f"Other programs used {measured.busy:.1f} cores while this was measured, "
        f"and {stored.busy:.1f} when it was before: "
        f"the earlier measurement stays ({cache_file()}; remove it to replace it)."
    )
    return stored


# --- the cache ---------------------------------------------------------------------------------------------------


def identity() -> str:
    """What a measurement is valid for: processor, cores, memory limit, torch version, GPUs."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    parts = [
        resource_limits.processor(),
        f"{resource_limits.cores()} cores",
        f"{resource_limits.memory()} bytes",
        f"torch {torch}",
    ]
    return "; ".join([*parts, *resource_limits.gpus()])


def cache_file() -> Path:
    """Where this machine's cluster is kept; hosts that share a home folder have a file each."""
    try:
        machine = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    name = blake2b(f"{machine}/{socket.gethostname()}".encode(), digest_size=6).hexdigest()
    return cache_folder() / f"cluster-{name}.toml"


def cached(*, say: Say = _silent) -> Cluster | None:
    """The kept cluster, or None when there is none, or it is of other hardware or unreadable (which `say` is told)."""
    file = cache_file()
    if not file.exists():
        return None
    try:
        cluster = clusters.read(file)
    except UserError as error:
        say(f"The kept measurement {file} cannot be used ({error.what}); measuring again.")
        return None
    if cluster.machine != identity():
        say(f"The kept measurement is of other hardware ({cluster.machine}); measuring again.")
        return None
    return cluster


def save(cluster: Cluster, *, say: Say = _silent) -> None:
    """Keeps `cluster` for `cached`, atomically; where the folder cannot be written `say` is told."""
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, clusters.dumps(cluster))
    except OSError as error:
        say(f"The measurement cannot be kept in {file.parent}: {error.strerror}.")


def forget_busy() -> None:
    """Has this machine measured anew when it is asked about the next time, if it was busy when it was measured."""
    cluster = cached()
    if cluster is not None and cluster.busy > BUSY:
        cache_file().unlink(missing_ok=True)


# --- the measuring program ---------------------------------------------------------------------------------------


def _measured(cores: int, seconds: float, say: Say) -> Table:
    """Runs `machine.measure` and returns its table."""
    command = [sys.executable, "-m", "espalier.machine.measure", str(cores), str(seconds)]
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH", "")) if part)
    with tempfile.TemporaryFile("w+") as errors:
        program = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # so that its forked processes can be stopped with it
        )
        assert program.stdout is not None
        watch = threading.Timer(TIMEOUT, _stop, (program,))
        watch.start()
        try:
            result = _listen(program.stdout, say)
            if result is None:
                program.wait(TIMEOUT)
        finally:
            watch.cancel()
            _stop(program)
            program.stdout.close()
        if result is None:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            raise RunFailed(
                f"Measuring this machine failed (exit {program.returncode}).",
                why=lines[-1] if lines else f"no answer within {TIMEOUT:.0f} s",
                do="write the machine down by hand (docs/cluster.md) and set plan.cluster",
            )
    return result


def _stop(program: subprocess.Popen[str]) -> None:
    """Ends the program and all it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait(TIMEOUT)


def _listen(lines: Iterable[str], say: Say) -> Table | None:
    for line in lines:
        try:
            table = json.loads(line)
        except json.JSONDecodeError:
            continue  # a library that prints
        if "say" in table:
            say(table["say"])
        if "result" in table:
            return table["result"]
    return None


# --- tables to values --------------------------------------------------------------------------------------------


def _inside(result: Table) -> Link:
    """The link between two devices of this machine."""
    cuda = result.get("cuda") or []
    if cuda:
        link = clusters.default_link(_named(cuda[0]["name"]), "cuda")
        if not result.get("peer"):
            return link
        return Link(bandwidth=result["peer"], latency=link.latency, launch=link.launch, measured=True,
                    source="probe: copy from device 0 to device 1; latency: " + link.source)  # fmt: skip
    measured = result["link"]
    if measured is None:
        return clusters.default_link("cpu", "cpu")
    return Link(**measured, measured=True, source="probe: two gloo ranks over loopback")


def _devices(result: Table, memory: int) -> list[tuple[Device, int, str]]:
    """(device, count, machine name) for each kind of device; neighbours of one name are one kind."""
    if not result.get("cuda"):
        return [(_processor(result, memory), 1, "")]
    kinds: list[list[Table]] = []
    for device in result["cuda"]:
        if kinds and kinds[-1][0]["name"] == device["name"]:
            kinds[-1].append(device)
        else:
            kinds.append([device])
    name = socket.gethostname() if len(kinds) > 1 else ""
    return [(_gpu(same[0]), len(same), name) for same in kinds]


def _processor(result: Table, memory: int) -> Device:
    return _device(
        result,
        name="cpu",
        kind="cpu",
        memory=memory,
        memory_bandwidth=max(processes * bandwidth for _, processes, bandwidth in result["copies"]),
        runtime=result["runtime"],
        copies=tuple(Copy(*row) for row in result["copies"]),
        source=f"probe: {resource_limits.processor()}, torch {result['torch']}",
    )


def _gpu(table: Table) -> Device:
    named = {"name": _named(table["name"]), "kind": "cuda", "source": f"probe: {table['name']}"}
    return _device(table, memory=table["memory"], memory_bandwidth=table["memory_bandwidth"], **named)


def _device(table: Table, **fields: Any) -> Device:
    """The device whose products are in `table`."""
    rates = tuple(Rate(*row) for row in table["rates"])
    return Device(flops=_best(table["rates"]), peak=False, dispatch=table["dispatch"], rates=rates, **fields)


def _best(rates: Iterable[list[Any]]) -> dict[str, float]:
    """Precision -> the best FLOP/s that all processes of a setting reached together in a product."""
    best: dict[str, float] = {}
    for what, precision, _rows, _inner, _columns, _threads, processes, flops in rates:
        if what == "product":
            best[precision] = max(best.get(precision, 0.0), processes * flops)
    return best


def _named(name: str) -> str:
    """The catalogue's name for a driver's name such as `NVIDIA A100-SXM4-80GB`, else the driver's own."""
    return clusters.known(name) or name
