"""Packing for training with features on disk (DiskGNN)."""
