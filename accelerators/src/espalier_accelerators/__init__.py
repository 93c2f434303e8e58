"""Simulated accelerators of graph networks: MEGA, HyGCN, GCNAX, GROW and SGCN, and their DRAM."""
