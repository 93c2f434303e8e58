"""Operations of a cluster: why a job failed (`diagnose`), what its jobs are like, which of its hosts are faulty.

Loads no torch.
"""

from typing import Any

from espalier.ops.taxonomy import Diagnosis, EvidenceLine, restart_helps

__all__ = ["Diagnosis", "EvidenceLine", "diagnose", "restart_helps"]


def __getattr__(name: str) -> Any:
    if name == "diagnose":
        from espalier.ops.diagnosis import diagnose

        return diagnose
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
