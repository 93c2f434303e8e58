"""The run log: one JSON line per event; every view of a run is made from it."""
