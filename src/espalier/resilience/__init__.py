"""What if something breaks? Why it broke is read from its logs; `guard` makes a loop outlive its replicas.

Loads no torch; `guard` does.
"""

from typing import Any

from espalier.resilience.acme.diagnose import diagnose
from espalier.resilience.acme.taxonomy import Diagnosis, Evidence, restart_helps

__all__ = ["Diagnosis", "Evidence", "diagnose", "guard", "restart_helps"]


def __getattr__(name: str) -> Any:
    if name == "guard":
        from espalier.resilience.guarded import guard

        return guard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
