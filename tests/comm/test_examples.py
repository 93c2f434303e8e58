"""The stand-alone uses run as they stand: a DDP hook and FSDP2."""

from __future__ import annotations

import re
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["ddp_hook.py", pytest.param("fsdp2.py", marks=pytest.mark.slow)])
def test_it_trains(name: str, tmp_path: Path) -> None:
    first, second = programs.launched(tmp_path, programs.script(ROOT / "examples" / name))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    said = first.stdout
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < 0.7 * losses[0]
    sent = re.search(r"sent ([\d.]+)", said)
    assert sent is None or float(sent[1]) < 0.28
