"""LuWu: the optimizer and all parameters on a node of their own; workers hold a few layers at a time."""
