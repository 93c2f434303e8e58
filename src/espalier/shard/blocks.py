"""The blocks of a model: what is gathered at once, and what waits for its own parameters only."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

LISTS = (nn.ModuleList, nn.Sequential)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of any model, in its own order: the entries of its outermost lists of two modules or more.

    Entries that hold no parameter do not count; a list of one, or a list inside an entry, is part of what holds it.
    """
    entries = [child for child in model.children() if any(True for _ in child.parameters())]
    if isinstance(model, LISTS) and len(entries) > 1:
        return list(dict.fromkeys(entries))
    return list(dict.fromkeys(block for child in entries for block in blocks_of(child)))


def norms_of(model: nn.Module) -> set[int]:
    """The ids of the parameters of normalising layers."""
    kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
    return {id(p) for module in model.modules() if isinstance(module, kinds) for p in module.parameters(recurse=False)}


class Membership:
    """Which parameters belong to which of `blocks`. One that is also used outside its block belongs to none."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        inside = {id(module) for block in blocks for module in block.modules()}
        outside = [module for module in model.modules() if id(module) not in inside]
        shared = {id(parameter) for module in outside for parameter in module.parameters(recurse=False)}
        self._block: dict[int, int] = {}
        for index, block in enumerate(blocks):
            for parameter in block.parameters():
                if self._block.setdefault(id(parameter), index) != index:
                    shared.add(id(parameter))
        for key in shared:
            self._block.pop(key, None)

    def of(self, parameter: nn.Parameter) -> int | None:
        """The index of its block, None outside all blocks."""
        return self._block.get(id(parameter))
