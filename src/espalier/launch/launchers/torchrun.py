"""Ranks started by torchrun, Kubernetes or Ray, which set PyTorch's own environment variables."""

from __future__ import annotations

import os

from espalier.recipe.errors import UserError
from espalier.train.rank_spec import RankSpec

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def place() -> RankSpec | None:
    """This process's place by PyTorch's `env://` variables, or None when nobody has set them.

    Raises UserError when only some of them are set, or are not numbers.
    """
    present = [name for name in _NEEDED if name in os.environ]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return None
    missing = [name for name in _NEEDED if name not in present]
    if missing:
        raise UserError(
            f"The environment names a rank but lacks {', '.join(missing)}.",
            why=f"{', '.join(present)} are set, as by a launcher",
            do="start with torchrun, or unset them to run on this machine alone",
        )
    rank = number("RANK")
    world = number("WORLD_SIZE")
    port = master_port()
    local = number("LOCAL_RANK", 0)
    # torchrun's agent serves a store for all its attempts; other launchers leave that to rank 0.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankSpec(
        rank=rank,
        world=world,
        local_rank=local,
        threads=max(1, len(os.sched_getaffinity(0)) // number("LOCAL_WORLD_SIZE", 1)),
        attempt=restarts() or 0,
        host=os.environ["MASTER_ADDR"],
        port=port,
        source="MASTER_ADDR",
        server="torchrun's agent" if agent else "rank 0",
        serves=rank == 0 and not agent,
    )


def restarts() -> int | None:
    """How often torchrun's agent on this machine has started its ranks again; None where it has not started them.

    Raises UserError where that is no number.
    """
    return number("TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in os.environ else None


def master_port() -> int:
    """MASTER_PORT. Raises UserError where it is no port."""
    port = number("MASTER_PORT")
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT={port} is not a valid port for the rendezvous.", do="MASTER_PORT=29500")
    return port


def number(name: str, default: int | None = None) -> int:
    """A launcher's variable. Raises UserError where it is no whole number."""
    text = os.environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text!r} is not a number.", why="launchers set it to a whole number") from None
