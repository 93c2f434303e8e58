"""Offload: optimizer states, parameters and activations in host memory or on disk between their uses."""
