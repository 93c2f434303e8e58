"""Every option of the product: one tree of frozen structs. Imports no torch.

A field that defaults to None is *derived*: `config.defaults` fills it in and says why. A choice is a tagged union on
`kind`, so the options of what you did not choose do not exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from espalier.config.decoder_shapes import Decoder as Decoder
from espalier.config.decoder_shapes import Gpt as Gpt
from espalier.config.decoder_shapes import Moe as Moe
from espalier.config.graphs import Gat as Gat
from espalier.config.graphs import Gcn as Gcn
from espalier.config.graphs import Gin as Gin
from espalier.config.graphs import GraphTransformer as GraphTransformer
from espalier.config.graphs import Messages as Messages
from espalier.config.graphs import Network as Network
from espalier.config.graphs import Sage as Sage
from espalier.config.model_kinds import KINDS
from espalier.config.modules import Module as Module
from espalier.config.multitask import Multitask as Multitask
from espalier.config.scenes import SpikingNerf as SpikingNerf
from espalier.config.scenes import Voxels as Voxels
from espalier.config.sections import A2q as A2q
from espalier.config.sections import Adamw as Adamw
from espalier.config.sections import Adapters as Adapters
from espalier.config.sections import Auto as Auto
from espalier.config.sections import ByRounds as ByRounds
from espalier.config.sections import Checkpoint as Checkpoint
from espalier.config.sections import Choice as Choice
from espalier.config.sections import Co2 as Co2
from espalier.config.sections import Comm as Comm
from espalier.config.sections import Constant as Constant
from espalier.config.sections import Cosine as Cosine
from espalier.config.sections import Data as Data
from espalier.config.sections import DiLoCo as DiLoCo
from espalier.config.sections import Dpo as Dpo
from espalier.config.sections import Eager as Eager
from espalier.config.sections import EveryStep as EveryStep
from espalier.config.sections import Faults as Faults
from espalier.config.sections import Full as Full
from espalier.config.sections import GraphOptions as GraphOptions
from espalier.config.sections import HaloOptions as HaloOptions
from espalier.config.sections import Launch as Launch
from espalier.config.sections import LocalSgd as LocalSgd
from espalier.config.sections import Lora as Lora
from espalier.config.sections import Mega as Mega
from espalier.config.sections import Muon as Muon
from espalier.config.sections import Options as Options
from espalier.config.sections import Pin as Pin
from espalier.config.sections import Planning as Planning
from espalier.config.sections import Precision as Precision
from espalier.config.sections import Quant as Quant
from espalier.config.sections import RecipeBase as RecipeBase
from espalier.config.sections import Recompute as Recompute
from espalier.config.sections import ShardPin as ShardPin
from espalier.config.sections import SlowMo as SlowMo
from espalier.config.sections import Stable as Stable
from espalier.config.sections import Store as Store
from espalier.config.sections import StreamingDiLoCo as StreamingDiLoCo
from espalier.config.sections import Sync as Sync
from espalier.config.sections import TaskOptions as TaskOptions
from espalier.config.sections import Tower as Tower
from espalier.config.sections import Track as Track
from espalier.config.sections import Train as Train
from espalier.config.sections import Tuning as Tuning
from espalier.config.sections import Uniform as Uniform

if TYPE_CHECKING:
    from espalier.config.sections import Model as Model
else:  # msgspec reads the annotation: the options of all kinds
    Model = Union[tuple(one for kind in KINDS for one in kind.options)]  # noqa: UP007


class Recipe(RecipeBase, frozen=True):
    """One recipe; `model` is of one of the kinds in `config.model_kinds`."""

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
        "train.compile",
        "name",
    ),
    *("graph.order", "graph.format", "graph.halo", "graph.pickle"),
    *("store.memory", "store.path", "store.disk"),
)
