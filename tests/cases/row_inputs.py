"""Files of rows for the tests of their readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(*rows: Any) -> bytes:
    """JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def put(folder: Path, name: str, content: bytes | str) -> Path:
    """Writes a file below `folder`."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file
