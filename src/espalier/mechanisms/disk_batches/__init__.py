"""DiskGNN: graphs whose features lie on disk, by offline sampling and feature packing.

The public names load on first use: the planner prices packed sets without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from espalier.mechanisms.disk_batches.mini_batches import MiniBatch as MiniBatch
    from espalier.mechanisms.disk_batches.mini_batches import MiniBatches as MiniBatches
    from espalier.mechanisms.disk_batches.mini_batches import PrepareOptions as PrepareOptions
    from espalier.mechanisms.disk_batches.mini_batches import prepare as prepare

__all__ = ["MiniBatch", "MiniBatches", "PrepareOptions", "prepare"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'espalier.mechanisms.disk_batches' has no attribute {name!r}")
    return getattr(import_module("espalier.mechanisms.disk_batches.mini_batches"), name)
