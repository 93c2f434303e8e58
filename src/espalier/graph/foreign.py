"""Anybody's message-passing network: `[model] kind = "messages", build = "package.module:function"`.

The function is called with (features, classes, **model.arguments) and returns an `nn.Module` whose forward takes
(x [nodes, features], edge_index int64 [2, edges]) and returns [nodes, classes]; a third argument called `edge_weight`
or `edge_attr` is filled where the graph has it.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from espalier import config
from espalier.errors import UserError
from espalier.named import function


def build(options: config.Messages, features: int, classes: int, folder: str | Path | None) -> nn.Module:
    """The network that `model.build` makes. Raises UserError for whatever its code raises or does not give."""
    made, author = function(options.build, folder)
    with author.answers("when it was called"):
        model = made(features, classes, **options.arguments)
    if not isinstance(model, nn.Module) or not any(one.requires_grad for one in model.parameters()):
        raise UserError(
            f"model.build = {options.build!r} returned {type(model).__name__}.",
            why="it must return a network with parameters to train",
            do="see docs/graph.md",
        )
    return model
