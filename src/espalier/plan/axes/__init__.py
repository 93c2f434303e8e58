"""Costs of the axes that the search runs over, and of what waits away from its rank: numbers or NumPy arrays. No
torch."""
