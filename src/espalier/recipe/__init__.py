"""Every option of the product: one tree of frozen structs. Imports no torch.

A field that defaults to None is *derived*: `recipe.defaults` fills it in and says why. A choice is a tagged union on
`kind`, so the options of what you did not choose do not exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from espalier.recipe import mechanism_options
from espalier.recipe.decoder_shapes import Decoder as Decoder
from espalier.recipe.decoder_shapes import Gpt as Gpt
from espalier.recipe.decoder_shapes import Moe as Moe
from espalier.recipe.graphs import Gat as Gat
from espalier.recipe.graphs import Gcn as Gcn
from espalier.recipe.graphs import Gin as Gin
from espalier.recipe.graphs import GraphTransformer as GraphTransformer
from espalier.recipe.graphs import MessagesModel as MessagesModel
from espalier.recipe.graphs import Network as Network
from espalier.recipe.graphs import Sage as Sage
from espalier.recipe.model_kinds import KINDS
from espalier.recipe.modules import Module as Module
from espalier.recipe.multitask import Multitask as Multitask
from espalier.recipe.scenes import SpikingNerf as SpikingNerf
from espalier.recipe.scenes import Voxels as Voxels
from espalier.recipe.sections import Adamw as Adamw
from espalier.recipe.sections import Adapters as Adapters
from espalier.recipe.sections import Auto as Auto
from espalier.recipe.sections import Checkpoint as Checkpoint
from espalier.recipe.sections import Choice as Choice
from espalier.recipe.sections import Comm as Comm
from espalier.recipe.sections import Constant as Constant
from espalier.recipe.sections import Cosine as Cosine
from espalier.recipe.sections import Data as Data
from espalier.recipe.sections import DiskOptions as DiskOptions
from espalier.recipe.sections import Dpo as Dpo
from espalier.recipe.sections import EveryStep as EveryStep
from espalier.recipe.sections import Faults as Faults
from espalier.recipe.sections import Full as Full
from espalier.recipe.sections import GraphOptions as GraphOptions
from espalier.recipe.sections import GraphParts as GraphParts
from espalier.recipe.sections import Launch as Launch
from espalier.recipe.sections import Lora as Lora
from espalier.recipe.sections import Muon as Muon
from espalier.recipe.sections import Options as Options
from espalier.recipe.sections import Pin as Pin
from espalier.recipe.sections import Planning as Planning
from espalier.recipe.sections import Precision as Precision
from espalier.recipe.sections import RecipeBase as RecipeBase
from espalier.recipe.sections import Recompute as Recompute
from espalier.recipe.sections import ShardPin as ShardPin
from espalier.recipe.sections import Stable as Stable
from espalier.recipe.sections import Sync as Sync
from espalier.recipe.sections import TaskOptions as TaskOptions
from espalier.recipe.sections import Tower as Tower
from espalier.recipe.sections import Track as Track
from espalier.recipe.sections import Train as Train
from espalier.recipe.sections import Tuning as Tuning

if TYPE_CHECKING:
    from espalier.recipe.sections import Model as Model
else:  # msgspec reads the annotation: the options of all kinds
    Model = Union[tuple(option for kind in KINDS for option in kind.options)]  # noqa: UP007


class Recipe(RecipeBase, frozen=True):
    """One recipe; `model` is of one of the kinds in `recipe.model_kinds`."""

    model: Model


# Keys that may differ when an existing run folder is taken up again: they say how the run is carried out, not what
# it means. `train.steps` may only grow.
RESUMABLE = (
    *(
        "plan",
        "checkpoint",
        "comm",
        "faults",
        "launch",
        "track",
        "train.steps",
        "train.validate_every",
        "train.validate_tokens",
        "train.compile",
        "name",
    ),
    *("graph.order", "graph.format", "graph.halo", "graph.pickle"),
    *("store.memory", "store.path"),
    *(f"{name}.{key}" for name, row in mechanism_options.TABLE.items() for key in row.resumable),
)
