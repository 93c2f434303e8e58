"""A model in memory: every worker has the very weights of the checkpoint, none has a copy."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.evaluate.shared_model import SharedModel, attach


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(700, 700)
        self.norm = nn.BatchNorm1d(700)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.big(x))


def mapped(file: str) -> dict[str, int]:
    """KiB of this process's mappings of the memory file, by kind."""
    counts: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            inside = file in line
        elif inside and words[-1] == "kB":
            counts[words[0][:-1]] = counts.get(words[0][:-1], 0) + int(words[1])
    return counts


def test_the_weights_are_those_of_the_checkpoint_and_are_mapped_not_copied(tmp_path: Path) -> None:
    saved = Net()
    Checkpoints(tmp_path).save(7, {"model": saved, "other": Net()}, {"step": 7}, wait=True)
    model = SharedModel(Checkpoints(tmp_path), 7, torch.float32)
    device = torch.device("cpu")
    copies = [attach(Net(), model.source, device) for _ in range(3)]
    for name, value in saved.state_dict().items():
        assert all(torch.equal(copy.state_dict()[name], value) for copy in copies)
    assert not copies[0].training
    for copy in copies:
        copy(torch.ones(1, 700))
    found = mapped("espalier-eval")
    assert found["Size"] > 3 * 700 * 700 * 4 / 1024
    assert found["Private_Dirty"] == 0
    model.close()
    assert torch.equal(copies[2].state_dict()["big.weight"], saved.big.weight)  # still there for those who map it


def test_floating_tensors_take_the_precision_of_the_run_and_counts_stay_whole(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(7, {"model": Net()}, {"step": 7}, wait=True)
    model = SharedModel(Checkpoints(tmp_path), 7, torch.bfloat16)
    attached = attach(Net().to(torch.bfloat16), model.source, torch.device("cpu"))
    assert {value.dtype for value in attached.state_dict().values()} == {torch.bfloat16, torch.int64}
    assert 2 * 700 * 700 <= os.path.getsize(model.source.path) < 4 * 700 * 700
    model.close()
    assert not os.path.exists(model.source.path)
