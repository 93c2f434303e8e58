"""Tables of plain data that lie beside a module, in a TOML file of its name."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def data_table(module_file: str) -> dict[str, Any]:
    """The tables beside the module whose `__file__` is given."""
    return tomllib.loads(Path(module_file).with_suffix(".toml").read_text(encoding="utf-8"))
