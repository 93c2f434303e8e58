"""Operations of a cluster: why a job failed (`diagnose`), what its jobs are like, which of its hosts are faulty.

Loads no torch.
"""

from espalier.ops.diagnosis import diagnose
from espalier.ops.taxonomy import Diagnosis, EvidenceLine, restart_helps

__all__ = ["Diagnosis", "EvidenceLine", "diagnose", "restart_helps"]
