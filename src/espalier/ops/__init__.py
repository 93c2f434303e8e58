"""Operations of a cluster: why a job failed (`diagnose`), what its jobs are like, which of its hosts are faulty.

Loads no torch.
"""

from espalier.ops.taxonomy import Diagnosis, EvidenceLine, restart_helps
from espalier.recipe.lazy_names import lazy_names

__all__ = ["Diagnosis", "EvidenceLine", "diagnose", "restart_helps"]


__getattr__ = lazy_names(__name__, {".diagnosis": "diagnose"})
