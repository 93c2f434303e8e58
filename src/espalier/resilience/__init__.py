"""What if something breaks? Why it broke is read from its logs. Loads no torch."""

from espalier.resilience.acme.diagnose import diagnose
from espalier.resilience.acme.taxonomy import Diagnosis, Evidence, restart_helps

__all__ = ["Diagnosis", "Evidence", "diagnose", "restart_helps"]
