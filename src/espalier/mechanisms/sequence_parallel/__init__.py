"""How is a long sequence split?"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from espalier.mechanisms.sequence_parallel.attention_2d import attend
    from espalier.parallel.sequence_slots import SequenceSlots

_HOME = {
    "attend": "espalier.mechanisms.sequence_parallel.attention_2d",
    "SequenceSlots": "espalier.parallel.sequence_slots",
}

__all__ = ["SequenceSlots", "attend"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'espalier.mechanisms.sequence_parallel' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
