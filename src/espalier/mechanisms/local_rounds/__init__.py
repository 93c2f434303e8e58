"""When do replicas agree? `CO2` is an outer agreement for anybody's own loop."""

from typing import Any

__all__ = ["CO2"]


def __getattr__(name: str) -> Any:
    if name == "CO2":
        from espalier.mechanisms.local_rounds.co2 import CO2

        return CO2
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
