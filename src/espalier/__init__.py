"""Espalier trains large models on the hardware you actually have."""
