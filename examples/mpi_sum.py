"""mpiexec -n 4 python examples/mpi_sum.py: sums an array over MPI ranks at 8 bits, without torch.distributed."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from espalier.comm import mpi

comm = MPI.COMM_WORLD
array = np.random.default_rng(comm.Get_rank()).standard_normal(1_000_000, dtype=np.float32)
residual = np.zeros_like(array)  # what 8 bits lose of this sum is added to the next
total = mpi.allreduce(comm, array, codec="int8", residual=residual)
exact = comm.allreduce(array.astype(np.float64))
lost = comm.allreduce(residual.astype(np.float64))
same = all(np.array_equal(total, other) for other in comm.allgather(total))
if comm.Get_rank() == 0:
    error = np.linalg.norm(total - exact) / np.linalg.norm(exact)
    print(f"{comm.Get_size()} ranks, relative error {error:.1e}, all alike: {same}")
    print(f"with what is kept for the next sum: {np.abs(total + lost - exact).max():.1e}")
