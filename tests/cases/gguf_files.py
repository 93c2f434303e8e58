"""Small GGUF files, written field by field."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np


def gguf_text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def coded(value: Any) -> bytes:
    """The type and the value of a field."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    parts = [coded(part) for part in value]
    return struct.pack("<I", 9) + parts[0][:4] + struct.pack("<Q", len(parts)) + b"".join(part[4:] for part in parts)


PLAIN: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.attention.head_count": 2,
    "llama.embedding_length": 8,
    "llama.block_count": 1,
    "llama.feed_forward_length": 16,
    "llama.context_length": 32,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.token_type": [1, 1, 1],
}
TENSORS = {
    "token_embd.weight": (3, 8),
    "output_norm.weight": (8,),
    **{f"blk.0.{name}_norm.weight": (8,) for name in ("attn", "ffn")},
    **{f"blk.0.attn_{name}.weight": (8, 8) for name in ("q", "k", "v", "output")},
    **{f"blk.0.ffn_{name}.weight": (16, 8) for name in ("gate", "up")},
    "blk.0.ffn_down.weight": (8, 16),
}


def gguf_of(file: Path, fields: dict[str, Any], tensors: dict[str, tuple[int, ...]], overlapping: bool = False) -> Path:
    """A file of these fields and tensors of zeros; `overlapping`: all begin where the first does."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    header += b"".join(gguf_text(name) + coded(value) for name, value in fields.items())
    start = 0
    for name, shape in tensors.items():
        header += gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], 0, start)
        start += -(-int(np.prod(shape)) * 4 // 32) * 32 * (not overlapping)
    file.write_bytes(header + bytes(-len(header) % 32) + bytes(start or 512))
    return file
