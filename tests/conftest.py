"""One thread and deterministic algorithms for every test: forks of this process then cannot hang, and memory that was
never written is NaN."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

# Shared machines stall for seconds now and then: how long a draw or an example took says nothing of the code.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
