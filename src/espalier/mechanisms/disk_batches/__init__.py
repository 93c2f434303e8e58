"""DiskGNN: graphs whose features lie on disk, by offline sampling and feature packing.

The public names load on first use: the planner prices packed sets without torch.
"""

from typing import TYPE_CHECKING

from espalier.recipe.lazy_names import lazy_names

if TYPE_CHECKING:
    from espalier.mechanisms.disk_batches.mini_batches import MiniBatch as MiniBatch
    from espalier.mechanisms.disk_batches.mini_batches import MiniBatches as MiniBatches
    from espalier.mechanisms.disk_batches.mini_batches import PrepareOptions as PrepareOptions
    from espalier.mechanisms.disk_batches.mini_batches import prepare as prepare

__all__ = ["MiniBatch", "MiniBatches", "PrepareOptions", "prepare"]


__getattr__ = lazy_names(__name__, {".mini_batches": "MiniBatch MiniBatches PrepareOptions prepare"})
