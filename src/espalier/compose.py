"""Orders a plan's mechanisms, or refuses with the reason and the nearest allowed choice. Pure; imports nothing of ours
but errors.
"""
