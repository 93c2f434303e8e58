"""Ranks of one machine: their processes, their supervisor, and what is left of one that failed."""
