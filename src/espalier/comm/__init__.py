"""What crosses the wire? The public names load on first use."""

from espalier.recipe.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from espalier.comm.base import Codec as Codec
    from espalier.comm.base import Ledger as Ledger
    from espalier.comm.base import Traffic as Traffic
    from espalier.comm.base import current_traffic as current_traffic
    from espalier.comm.base import feedback as feedback
    from espalier.comm.base import sent_bytes as sent_bytes
    from espalier.comm.base import traffic as traffic
    from espalier.comm.channel import Channel as Channel
    from espalier.comm.codecs import codec as codec
    from espalier.comm.ddp import ddp_hook as ddp_hook
    from espalier.comm.exact import EXACT as EXACT
    from espalier.comm.exact import Exact as Exact
    from espalier.comm.rendezvous import connect as connect
    from espalier.comm.rendezvous import disconnect as disconnect
    from espalier.comm.rendezvous import phase as phase

__getattr__ = lazy_names(
    __name__,
    {
        ".base": "Codec Ledger Traffic current_traffic feedback sent_bytes traffic",
        ".channel": "Channel",
        ".codecs": "codec",
        ".ddp": "ddp_hook",
        ".exact": "EXACT Exact",
        ".rendezvous": "connect disconnect phase",
    },
)
