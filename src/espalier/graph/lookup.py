"""What the words of a graph's recipe stand for, by module name: networks, ways of batching, rounding, exports.

A recipe imports the modules that it asks for and no others; mechanisms are reached from here alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from espalier import recipe as config
from espalier.recipe import GraphTransformer

if TYPE_CHECKING:
    from espalier.graph.run import NetworkAdapter, Rounding
    from espalier.graph.sampling.batch_strategy import Drawn
    from espalier.recipe import Recipe

BATCHINGS = {
    "whole": "graph.sampling.batch_strategy:Whole",
    "drawn": "graph.sampling.batch_strategy:Drawn",
    "stored": "mechanisms.disk_batches.mini_batches:RunBatches",
    "parts": "mechanisms.halo_exchange.halo_parallel:PartBatching",
    "tokens": "mechanisms.pattern_attention.token_parallel:TokenBatching",
}
"""Ways of batching."""
FEW_BITS = "mechanisms.few_bits.run_rounding:QuantizedRounding"
PACKED = "mechanisms.few_bits.packed_run"
ENERGY = "mechanisms.few_bits.energy:tables"


def named(name: str) -> Any:
    """What `name`, a module of the package and something in it (`graph.sampling.batch_strategy:Whole`), stands for."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"espalier.{module}"), attribute)


def network(recipe: Recipe) -> NetworkAdapter:
    """The adapter of the networks of the recipe's kind."""
    match recipe.model:
        case GraphTransformer():
            name = "mechanisms.pattern_attention.adapter:TransformerAdapter"
        case config.MessagesModel():
            name = "graph.networks.foreign_network:ForeignAdapter"
        case _:
            name = "graph.networks.gnn_adapter:GnnAdapter"
    return named(name)(recipe)


def way_of_batching(recipe: Recipe) -> str:
    """Its name in `BATCHINGS`."""
    options = recipe.graph
    assert options is not None
    if recipe.store is not None:
        return "stored"
    if options.halo is not None:
        return "tokens" if isinstance(recipe.model, GraphTransformer) else "parts"
    return "whole" if options.task == "node" and not options.fanouts else "drawn"


def batching(recipe: Recipe) -> type[Drawn]:
    """The recipe's way of batching."""
    return named(BATCHINGS[way_of_batching(recipe)])


def rounding(recipe: Recipe) -> type[Rounding]:
    """What rounds values of the recipe's networks."""
    return named(FEW_BITS if "quant" in recipe.mechanisms else "graph.run:Rounding")
