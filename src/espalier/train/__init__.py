"""The trainer: what a run is made of, and the loop that makes its steps."""
