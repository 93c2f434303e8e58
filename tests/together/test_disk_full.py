"""A disk that gets full while a run trains: it stops and says how many bytes more, and the same command goes on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs import MACHINE, forked

pytestmark = pytest.mark.slow

RECIPE = """
[model]
kind = "sage"
width = 8
[data]
path = "planted:nodes=20000,degree=6,features=64,train=0.02"
[graph]
fanout = [5, 5]
[store]
memory = "4MiB"
path = "small"
resample = 0.5
[train]
steps = 30
batch_tokens = 64
validate_every = 30
[plan]
cluster = "machine.toml"
trial = false
[plan.pin]
ranks = 1
[checkpoint]
every = 4
keep_best = false
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "machine.toml").write_text(MACHINE)
    return tmp_path


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], None]]:
    """Mounts a disk of so many bytes on a folder, or makes it as large."""
    mounted: list[Path] = []

    def mount(folder: Path, size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        again = ["remount,"] if folder in mounted else [""]
        command = ["mount", "-t", "tmpfs", "-o", f"{again[0]}size={size}", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting needs root")
        if folder not in mounted:
            mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], capture_output=True, check=False)


def steps(run: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def stops_and_goes_on(home: Path, small: Path, mount: Callable[[Path, int], None], size: int, least: int) -> None:
    """The recipe in `home`, whose run "short" has its disk in `small`."""
    mount(small, size)
    done = forked(home, "train", "recipe.toml", "--run", "runs/short")
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert "bytes more" in said
    assert "Traceback" not in said
    made = steps(home / "runs" / "short")
    assert least <= len(made) < len(steps(home / "runs" / "whole"))
    mount(small, 1 << 30)
    done = forked(home, "train", "recipe.toml", "--run", "runs/short")
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(home / "runs" / "short") == steps(home / "runs" / "whole")


def test_while_batches_are_packed_anew(home, small_disk) -> None:
    (home / "recipe.toml").write_text(RECIPE)
    done = forked(home, "train", "recipe.toml", "--run", "runs/whole")
    assert done.returncode == 0, done.stdout + done.stderr
    (packed,) = (home / "small").glob("packed-*")
    first = sum(path.stat().st_size for path in packed.glob("*") if path.is_file())
    subprocess.run(["rm", "-r", home / "small"], check=True)
    stops_and_goes_on(home, home / "small", small_disk, int(1.2 * first), least=7)
