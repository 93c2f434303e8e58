"""What if something breaks? `guard` makes a loop outlive its replicas. Loads no torch; `guard` does."""

from typing import Any

__all__ = ["guard"]


def __getattr__(name: str) -> Any:
    if name == "guard":
        from espalier.launch.resilience.fault_tolerant_ddp import guard

        return guard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
