"""The README's second door: its example, run as written, gives what plain PyTorch gives."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import programs
import torch

from many_ranks import same

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "loop.py"
CLUSTER = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'


def test_the_readme_shows_the_example() -> None:
    shown = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert textwrap.dedent(shown[0]).strip() in EXAMPLE.read_text()


def test_the_example_gives_what_plain_pytorch_gives(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    first, second = programs.launched(tmp_path, programs.script(EXAMPLE))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert re.search(r"loss 0\.\d+", first.stdout)

    plain: dict[str, Any] = {}
    lines = EXAMPLE.read_text().split("import espalier\n")[1].splitlines()
    ours = ("plan = ", "model, optimizer = ", "rank = ", "start, stop = ", "state = ")
    kept = [line for line in lines if not line.startswith(ours)]
    script = "\n".join(kept).partition("if rank == 0")[0]
    exec("import torch\nstart, stop = 0, 64\n" + script, plain)  # the same loop without our two lines
    same(torch.load(tmp_path / "model.pt"), plain["model"].state_dict(), relative=1e-4)


def test_parts_by_themselves_train_and_restore(tmp_path: Path) -> None:
    first, second = programs.launched(tmp_path, programs.script(ROOT / "examples" / "parts.py"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    found = re.search(r"loss (0\.\d+), step 50 restored, ([\d,]+) bytes sent", first.stdout)
    assert found is not None
    assert float(found[1]) < 0.5
    assert int(found[2].replace(",", "")) > 50 * 4 * 2179  # an all-reduce of the gradients in each step, and more
