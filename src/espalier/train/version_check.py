"""Version check: before the first step all ranks compare versions, recipe and data. An odd one is named.

Loads no torch until ranks compare over a group: hosts that a user names say their versions before anything else.
"""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.recipe.errors import DISTRIBUTION, UserError

if TYPE_CHECKING:
    from espalier.comm.plain_collectives import RankGroup


def identity(**hashes: str) -> dict[str, str]:
    """What all ranks must share: versions of Espalier (with a hash of its code), Python (3.11 is 3.11) and PyTorch,
    and the given hashes. Plus the host's name."""
    return {
        "host": socket.gethostname(),
        "espalier": f"{_version(DISTRIBUTION)} ({code()})",
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": _version("torch").split("+")[0],
        **hashes,
    }


@cache
def code() -> str:
    """A hash of this package's source: two checkouts may bear one version."""
    package = Path(__file__).parents[1]
    whole = sha256()
    for file in sorted(package.rglob("*.py")):
        whole.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()[:8]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def compare(identity: Mapping[str, str], group: RankGroup) -> None:
    """Gathers every rank's identity over `group` and raises UserError on all ranks when they differ."""
    if group is None:
        return
    from espalier.comm import plain_collectives
    from espalier.comm.base import Traffic, traffic

    if group.size() == 1:
        return
    with traffic(Traffic.CONTROL):
        gathered = plain_collectives.all_gather(dict(identity), group)
    check(gathered)


def check(identities: Sequence[Mapping[str, str]]) -> None:
    """Raises UserError naming the ranks and hosts that disagree with most. Pure; `host` itself may differ."""
    keys = [key for key in identities[0] if key != "host"]
    for key in keys:
        values = [identity_of_rank.get(key, "?") for identity_of_rank in identities]
        usual, count = Counter(values).most_common(1)[0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if not odd:
            continue
        named = ", ".join(f"rank {rank} on {identities[rank]['host']} has {values[rank]}" for rank in odd[:4])
        raise UserError(
            f"The ranks do not agree on {key}: {named}; {count} of {len(values)} have {usual}.",
            why="every rank must run the same code on the same recipe and data",
            do=_REMEDY.get(key, f"make {key} the same everywhere"),
        )


_REMEDY = {
    "espalier": "install the same Espalier on every host",
    "data": "copy the corpus to every host, or delete the token cache on the odd one so that it is built again",
    "recipe": "use the same recipe file and overrides on every host",
    "python": "use the same Python version on every host",
    "torch": "install the same PyTorch on every host",
}
