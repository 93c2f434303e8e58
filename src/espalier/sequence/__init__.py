"""How is a long sequence split?"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from espalier.sequence.loongtrain import attend
    from espalier.sequence.slots import SequenceSlots

_HOME = {"attend": "loongtrain", "SequenceSlots": "slots"}

__all__ = ["SequenceSlots", "attend"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'espalier.sequence' has no attribute {name!r}")
    return getattr(import_module(f"espalier.sequence.{_HOME[name]}"), name)
