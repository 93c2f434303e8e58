"""One thread and deterministic algorithms for every test: forks of this process then cannot hang, and memory that was
never written is NaN."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
