"""Launchers that start ranks for us: torchrun, srun, mpiexec."""
