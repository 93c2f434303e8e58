"""How does a token reach its expert?"""

from espalier.recipe.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from espalier.mechanisms.expert_parallel.routed_experts import RoutedExperts, route

__all__ = ["RoutedExperts", "route"]


__getattr__ = lazy_names(__name__, {".routed_experts": "RoutedExperts route"})
