"""Measured runs of this and other systems: read from a CSV or from JSON lines, and held against predictions."""
