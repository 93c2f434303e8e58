"""LuWu: the optimizer and all parameters on a node of their own; workers hold a few layers at a time.

In a loop of your own: `job_of`, `start_node`, `Client` and `attach` (README.md).
"""

from espalier.recipe.lazy_names import lazy_names

__getattr__ = lazy_names(__name__, {".user_loop": "Client NodeJob StepLost attach job_of start_node"})
