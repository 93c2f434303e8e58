"""The page on graphs: its recipe is the example's, and its code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "graph.md").read_text(encoding="utf-8"), re.S)


def test_the_page_shows_the_example_as_it_is():
    assert blocks("toml")[0] == (ROOT / "examples" / "graph.toml").read_text(encoding="utf-8")


def test_the_page_shows_the_example_on_disk_and_lines_of_the_loop_as_they_are():
    assert blocks("toml")[1] == (ROOT / "examples" / "graph-on-disk.toml").read_text(encoding="utf-8")
    assert blocks("python")[0] in (ROOT / "examples" / "disk_loop.py").read_text(encoding="utf-8")


def test_anybodys_loop_learns_from_features_on_disk():
    command = [sys.executable, str(ROOT / "examples" / "disk_loop.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    losses = [float(line.rpartition(" ")[2]) for line in found.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 0.8 * losses[0]


def test_the_example_on_disk_trains_with_features_ten_times_the_memory(tmp_path):
    (tmp_path / "machine.toml").write_text('[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n')
    example = str(ROOT / "examples" / "graph-on-disk.toml")
    small = ["data.path=planted:nodes=8000,degree=6,features=64,classes=4,train=0.05", "store.memory=0.19MiB"]
    small += [
        "train.steps=10",
        "train.batch_tokens=2",
        "train.validate_every=10",
        "plan.pin.ranks=1",
        "plan.pin.threads=1",
    ]
    small += [
        f"data.cache={tmp_path}",
        f"store.path={tmp_path / 'packed'}",
        "plan.cluster=machine.toml",
        "plan.trial=false",
    ]
    found = subprocess.run(
        [sys.executable, "-m", "espalier", "train", example, *small, "--run", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "finished at step 10 of 10" in found.stdout
    assert "features from" in found.stdout
    assert 8000 * 64 * 4 >= 10 * 0.19 * 2**20


def test_the_ten_lines_run(capsys):
    (code,) = (one for one in blocks("python") if "Sampler(" in one)
    exec(code, {})
    nodes, edges = capsys.readouterr().out.rsplit("[", 1)
    assert nodes.startswith("[ 0 50")
    assert edges.strip() == "12, 4]"
