"""LuWu: the optimizer and all parameters on a node of their own; workers hold a few layers at a time.

In a loop of your own: `job_of`, `start_node`, `Client` and `attach` (README.md).
"""

from __future__ import annotations

from typing import Any

_PUBLIC = ("Client", "NodeJob", "StepLost", "attach", "job_of", "start_node")


def __getattr__(name: str) -> Any:
    """The names above, loaded when they are used."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from espalier.mechanisms.optimizer_node import user_loop

    return getattr(user_loop, name)
