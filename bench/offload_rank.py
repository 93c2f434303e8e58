"""One contestant of bench/offload.py: the same decoder, batches and loop, with optimizer states in one place.

    python bench/offload_rank.py REQUEST.json

Prints seconds per step and losses as JSON. Imports nothing of Espalier for its peers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plain_loop import Decoder

RATE, DECAY = 1e-3, 0.1


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    return [
        {"params": [one for one in model.parameters() if (one.ndim >= 2) is decays], "weight_decay": decay}
        for decays, decay in ((True, DECAY), (False, 0.0))
    ]


class Resident:
    """Plain PyTorch with all states in memory."""

    def __init__(self, model: nn.Module, request: dict[str, Any]) -> None:
        self.model = model
        self.optimizer = self.made(model, request)

    def made(self, model: nn.Module, request: dict[str, Any]) -> Any:
        return torch.optim.AdamW(groups(model), RATE, fused=True)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class ByHand(Resident):
    """The same with states in files that are mapped into memory."""

    def made(self, model: nn.Module, request: dict[str, Any]) -> Any:
        optimizer = super().made(model, request)
        for number, one in enumerate(model.parameters()):
            state = {
                kind: torch.from_file(
                    f"{request['folder']}/{number}.{kind}", shared=True, size=one.numel(), dtype=one.dtype
                ).view(one.shape)
                for kind in ("exp_avg", "exp_avg_sq")
            }
            optimizer.state[one] = {"step": torch.zeros(()), **state}
        return optimizer


class Ours(Resident):
    """Espalier's optimizer, with its states in memory."""

    def made(self, model: nn.Module, request: dict[str, Any]) -> Any:
        from espalier.machine.malloc_trim import keep_freed
        from espalier.optim import adamw
        from espalier.optim.base import owned_by
        from espalier.recipe import Adamw

        keep_freed()  # as `espalier train` begins
        options = Adamw(learning_rate=RATE, weight_decay=DECAY, betas=(0.9, 0.999))
        return adamw.build(options, owned_by(model), self.group(model, request))

    def group(self, model: nn.Module, request: dict[str, Any]) -> Any:
        from espalier.optim.base import OptimizerGroup

        return OptimizerGroup

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(1.0)
        self.model.zero_grad(set_to_none=True)


class OnDisk(Ours):
    """The same with states on disk."""

    kept = 0.0
    """Share of the states that stays in memory."""

    def group(self, model: nn.Module, request: dict[str, Any]) -> Any:
        from espalier.mechanisms.offload.optimizer import StateFolder

        size = sum(one.nbytes for one in model.parameters())
        self.states = StateFolder(Path(request["folder"]), "states")
        self.states.resident = int(self.kept * 2 * size)
        return self.states.group


class HalfOnDisk(OnDisk):
    """As `espalier train` does where memory holds half of the states."""

    kept = 0.5


class DeepSpeed:
    """ZeRO-3 with `offload_optimizer`."""

    def __init__(self, model: nn.Module, request: dict[str, Any]) -> None:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({"DS_ACCELERATOR": "cpu", "MASTER_PORT": str(request["port"]), **rank})
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        device = request["contestant"].split()[-1]
        place = {"device": device} | ({"nvme_path": request["folder"]} if device == "nvme" else {})
        config = {
            "train_micro_batch_size_per_gpu": request["micro_batch"],
            "gradient_accumulation_steps": request["batch"] // request["micro_batch"],
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 3, "offload_optimizer": place},
        }
        optimizer = torch.optim.AdamW(groups(model), RATE, fused=True)
        self.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.parts = request["batch"] // request["micro_batch"]

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss * self.parts)  # DeepSpeed divides by the number of micro-batches
        self.model.step()

    def step(self) -> None:
        """Taken by the last of `model.step`."""


KINDS = {
    "resident": Resident, "by hand": ByHand, "ours in memory": Ours, "ours on disk": OnDisk,
    "ours half on disk": HalfOnDisk, "deepspeed cpu": DeepSpeed, "deepspeed nvme": DeepSpeed,
}  # fmt: skip


def main(request: dict[str, Any]) -> None:
    """Trains, and prints what it took."""
    torch.set_num_threads(request["threads"])
    torch.manual_seed(0)
    sizes = request["sizes"]
    contestant = KINDS[request["contestant"]](Decoder(sizes), request)
    draw = torch.Generator().manual_seed(1)
    seconds, losses = [], []
    for _ in range(request["steps"]):
        rows = torch.randint(sizes["vocabulary"], (request["batch"], sizes["sequence"] + 1), generator=draw)
        begun, total = time.perf_counter(), 0.0
        for part in rows.split(request["micro_batch"]):
            loss = F.cross_entropy(contestant.model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            loss = loss * len(part) / len(rows)
            total += float(loss.detach())
            contestant.backward(loss)
        contestant.step()
        seconds.append(time.perf_counter() - begun)
        losses.append(total)
    print(json.dumps({"seconds": seconds, "losses": losses}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
