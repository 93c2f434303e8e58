"""When do replicas agree? `CO2` is an outer agreement for anybody's own loop."""

from espalier.recipe.lazy_names import lazy_names

__all__ = ["CO2"]


__getattr__ = lazy_names(__name__, {".co2": "CO2"})
