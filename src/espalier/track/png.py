"""An image as a PNG file in a data URI, which a page can show without another file (RFC 2083; 8 bits, no filter)."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray


def encode(pixels: NDArray[np.uint8]) -> bytes:
    """PNG of `pixels`: uint8 [height, width] in grey, or [height, width, 3] in red, green and blue."""
    grey = pixels.ndim == 2
    assert pixels.dtype == np.uint8, pixels.dtype
    assert grey or (pixels.ndim == 3 and pixels.shape[2] == 3), pixels.shape
    height, width = pixels.shape[:2]
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    unfiltered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if grey else 2, 0, 0, 0)
    data = zlib.compress(unfiltered.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """The image in a link."""
    return "data:image/png;base64," + base64.b64encode(encode(pixels)).decode()
