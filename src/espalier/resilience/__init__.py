"""What if something breaks? Why it broke is read from its logs; whoever starts ranks asks here what to do. No torch."""

from espalier.resilience.acme.diagnose import diagnose
from espalier.resilience.acme.taxonomy import Diagnosis, Evidence, restart_helps

__all__ = ["Diagnosis", "Evidence", "diagnose", "restart_helps"]
