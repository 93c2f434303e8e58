"""Where things that outlive a run are kept. Imports nothing of ours."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/espalier`, else `~/.cache/espalier`: token shards, the probe's result, trials."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "espalier"
