"""How is a long sequence split?"""

from espalier.recipe.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from espalier.mechanisms.sequence_parallel.attention_2d import attend
    from espalier.parallel.sequence_slots import SequenceSlots

__all__ = ["SequenceSlots", "attend"]


__getattr__ = lazy_names(__name__, {".attention_2d": "attend", "espalier.parallel.sequence_slots": "SequenceSlots"})
