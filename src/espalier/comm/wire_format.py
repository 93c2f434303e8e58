"""Wire format of encoded tensors: a header of 48 bytes with checksums, and the fallback where a codec cannot carry a
value.

A message is one or two sends. The length of the first is known to the receiver: the header, and behind it the bytes of
a codec whose length is fixed. The second, whose length the header tells, has the bytes of a codec without fixed length,
or the tensor as it is where its values are not all finite: NaN and infinity arrive as every bit of them.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from espalier.comm.base import Codec
from espalier.comm.codec_input import bytes_of
from espalier.comm.finite_check import MARK, FiniteCheck
from espalier.recipe.errors import RESUME, RunFailed

_LAYOUT = struct.Struct("<4sBBHIIQQQ")
"""Magic, version, raw, bytes of an element, collective, codec, elements, bytes of the second send, checksum of what the
codec wrote; behind it the checksum of all that."""
HEADER = _LAYOUT.size + 8
_MAGIC = b"ESPC"
_VERSION = 1


class WireHeader(NamedTuple):
    """What a message says of itself."""

    raw: bool
    width: int
    number: int
    codec: int
    elements: int
    rest: int
    checksum: int


class Bucket(NamedTuple):
    """Which message it is, for its header and for the error where it is damaged: the traffic class, and the number of
    the collective in its group; for senders, their rank."""

    kind: str
    number: int
    rank: int = -1


def first_bytes(codec: Codec, elements: int, width: int) -> int:
    """Bytes of the first send."""
    return HEADER + (int(codec.wire_bytes(elements, width)) if codec.fixed else 0)


def most_bytes(codec: Codec, elements: Any, width: int) -> Any:
    """Bytes of both sends (NumPy arrays allowed): exact for a codec of fixed length and finite values, else at most
    (while values are)."""
    return HEADER + codec.wire_bytes(elements, width)


def seal(codec: Codec, values: Tensor, bucket: Bucket) -> tuple[list[Tensor], bool]:
    """The sends of `values` [n], and whether they go as they are. Raises RunFailed where they are not finite and the
    codec is to stop there."""
    wire = codec.encode(values)
    raw = wire is None
    if raw and isinstance(codec, FiniteCheck):
        raise _not_finite(values, bucket, codec)
    body = bytes_of(values) if wire is None else bytes_of(wire)
    first_message = torch.empty(first_bytes(codec, values.numel(), values.element_size()), dtype=torch.uint8)
    inside = codec.fixed and not raw
    if inside:
        first_message[HEADER:] = body
    elif codec.fixed:
        first_message[HEADER:] = 0
    header = WireHeader(
        raw,
        values.element_size(),
        bucket.number & 0xFFFFFFFF,
        _mark(codec),
        values.numel(),
        0 if inside else body.numel(),
        _checksum(body),
    )
    head = _LAYOUT.pack(_MAGIC, _VERSION, *header)
    head += xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")
    first_message[:HEADER] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return ([first_message] if inside or not body.numel() else [first_message, body]), raw


def header_of(first: Tensor, codec: Codec, like: Tensor, origin: tuple[Bucket, int]) -> WireHeader:
    """What the first send says. Raises RunFailed when it is not the message that `like` [n] waits for.

    `origin`: the bucket, and the rank it comes from.
    """
    text = first[:HEADER].numpy().tobytes()
    if xxhash.xxh3_64_intdigest(text[:-8]).to_bytes(8, "little") != text[-8:]:
        raise damaged(origin, "the checksum of its header does not fit")
    magic, version, *fields = _LAYOUT.unpack(text[:-8])
    header = WireHeader(bool(fields[0]), *fields[1:])
    expected = (like.element_size(), origin[0].number & 0xFFFFFFFF, _mark(codec), like.numel())
    stated = (header.width, header.number, header.codec, header.elements)
    most = like.nbytes if header.raw else most_bytes(codec, like.numel(), like.element_size())
    if (magic, version) != (_MAGIC, _VERSION) or stated != expected or header.rest > most:
        raise damaged(origin, f"its header says {stated}, and {expected} was expected (width, number, codec, elements)")
    return header


def opened(codec: Codec, sends: tuple[Tensor, Tensor | None], like: Tensor, origin: tuple[Bucket, int]) -> Tensor:
    """The values of a message, in `like`'s shape and dtype. Raises RunFailed when it was damaged on its way."""
    first, rest = sends
    header = header_of(first, codec, like, origin)
    body = first[HEADER:] if rest is None else rest
    if header.rest == 0 and not codec.fixed:
        body = first[:0]
    if _checksum(body) != header.checksum:
        raise damaged(origin, "its checksum does not fit its bytes")
    if header.raw:
        return body.view(like.dtype).view(like.shape)
    return codec.decode(body, like)


def damaged(origin: tuple[Bucket, int], why: str) -> RunFailed:
    """The error for a message that is not what was sent."""
    bucket, source = origin
    return RunFailed(
        f"A message of class {bucket.kind!r} from rank {source} is damaged (collective {bucket.number} of its group).",
        why=why,
        do=f"{RESUME}; if it happens again, test the memory and network of that rank's host",
    )


def _not_finite(values: Tensor, bucket: Bucket, codec: Codec) -> RunFailed:
    bad = values.numel() - int(values.isfinite().sum())
    return RunFailed(
        f"Rank {bucket.rank} was to send NaN or infinity in class {bucket.kind!r} (collective {bucket.number} of its "
        "group).",
        why=f"{bad:,} of {values.numel():,} values of the piece are not finite, and codec {codec.name!r} stops there",
        do=f"a lower learning rate, or codec {codec.name.removesuffix(MARK)!r}, which lets them through as they are",
    )


def _mark(codec: Codec) -> int:
    return zlib.crc32(codec.name.encode())


def _checksum(body: Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(body.numpy().data)) if body.numel() else 0
