"""Decoupled evaluation: a run's checkpoints scored beside training, by processes of low priority.

After Acme (Hu et al., NSDI 2024, arXiv 2403.07648), section "decoupled evaluation": training stores a checkpoint and
goes on; the checkpoint is loaded once and shared; the evaluation is split by dataset, longest first. Theirs starts jobs
of a cluster and computes metrics apart from inference; ours are processes of one machine that do both.
"""
