"""Where do rows wait that are larger than memory? Files past the page cache, extents, generations, rows, tiers.

The names load on first use: `espalier.store.cost` needs no torch.
"""

from espalier.recipe.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from espalier.recipe.cache_dir import DiskFull as DiskFull
    from espalier.store.base import Rows as Rows
    from espalier.store.budget import Budget as Budget
    from espalier.store.cost import PAGE as PAGE
    from espalier.store.cost import pages as pages
    from espalier.store.direct_io import DirectFile as DirectFile
    from espalier.store.direct_io import File as File
    from espalier.store.direct_io import StripedFile as StripedFile
    from espalier.store.direct_io import aligned as aligned
    from espalier.store.direct_io import check_room as check_room
    from espalier.store.extents import DamagedExtent as DamagedExtent
    from espalier.store.extents import ExtentFile as ExtentFile
    from espalier.store.extents import ExtentWriter as ExtentWriter
    from espalier.store.generations import Generations as Generations
    from espalier.store.io_queue import IoQueue as IoQueue
    from espalier.store.memory import MemoryRows as MemoryRows
    from espalier.store.page_cache import PageCache as PageCache
    from espalier.store.prefetch import PrefetchPipeline as PrefetchPipeline
    from espalier.store.rows import RowFile as RowFile
    from espalier.store.rows import RowLayout as RowLayout
    from espalier.store.rows import RowWriter as RowWriter
    from espalier.store.rows import padded as padded
    from espalier.store.tiers import ExtentTier as ExtentTier
    from espalier.store.tiers import MemoryTier as MemoryTier
    from espalier.store.tiers import PageTier as PageTier
    from espalier.store.tiers import Tier as Tier
    from espalier.store.tiers import TierRows as TierRows
    from espalier.store.tiers import place_rows as place_rows

_HOME = {
    ".base": "Rows",
    ".budget": "Budget",
    ".cost": "PAGE pages",
    ".direct_io": "DirectFile DiskFull File StripedFile aligned check_room",
    ".extents": "DamagedExtent ExtentFile ExtentWriter",
    ".generations": "Generations",
    ".io_queue": "IoQueue",
    ".memory": "MemoryRows",
    ".page_cache": "PageCache",
    ".prefetch": "PrefetchPipeline",
    ".rows": "RowFile RowLayout RowWriter padded",
    ".tiers": "ExtentTier MemoryTier PageTier Tier TierRows place_rows",
}
__getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(" ".join(_HOME.values()).split())
