"""What if something breaks? `guard` makes a loop outlive its replicas. Loads no torch; `guard` does."""

from espalier.recipe.lazy_names import lazy_names

__all__ = ["guard"]

__getattr__ = lazy_names(__name__, {".fault_tolerant_ddp": "guard"})
