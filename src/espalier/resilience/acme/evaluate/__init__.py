"""Evaluation apart from training: many tasks over few workers, each committed checkpoint once.

After Acme (Hu et al., NSDI 2024, arXiv 2403.07648), section "decoupled evaluation". Theirs starts cluster jobs, one
that loads a checkpoint into a node's shared memory and others that map it; ours are processes of one machine.
"""
