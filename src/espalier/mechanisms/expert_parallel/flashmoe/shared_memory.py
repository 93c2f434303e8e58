"""Shared memory: rows between ranks of one machine, without a socket between them.

The sender copies a tensor into memory that both see, and says where in a message of the group, as FlashMoE's cells and
flags (arXiv 2506.04667, section 3.2): only these words cross Gloo, several at once, so that deadlines, failures and
their reports are the group's as ever. Deviation: cells have no fixed place. A sender takes room where its receiver has
read all, and its memory grows with what is under way.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from espalier.comm.base import Traffic, traffic
from espalier.comm.channel import Channel
from espalier.comm.comm_thread import CommThread
from espalier.mechanisms.expert_parallel.flashmoe.transport import PeerMessages

CHUNK = 2**22
"""Bytes of a chunk at least. Pages that nobody wrote take no memory."""
_ALIGNED = 64
_WORDS = 15
"""Words of a message: a tag, and where the bytes lie (descriptor, offset, size). The first is how many follow."""
_TOGETHER = 4
"""Answers that are announced together while this rank has work."""
_PATIENCE = 2.0
"""Seconds that a rank which leaves waits for others to read what it sent; after an error none."""
_TAG = 1  # no tag of `layer`
_NAME = "espalier experts"


def neighbours(group: dist.ProcessGroup) -> frozenset[int]:
    """The ranks of `group` that see this one's memory and whose memory it sees: of one machine, one user and one
    network namespace (hosts of a lab have none in common). All ranks call this. Raises nothing: there may be none."""
    store = group.get_group_store()
    me = group.rank()
    size = group.size()
    turn = store.add(f"{_NAME}/turn {me}", 1)
    token = secrets.token_hex(16)
    descriptor = os.memfd_create(_NAME) if sys.platform == "linux" else -1
    try:
        where = "nowhere"
        if descriptor >= 0:
            os.write(descriptor, token.encode())
            where = f"/proc/{os.getpid()}/fd/{descriptor} {token} {_machine()}"
        others = [rank for rank in range(size) if rank != me]
        store.set(f"{_NAME}/{turn}/place {me}", where)
        seen = {rank for rank in others if _reads(store.get(f"{_NAME}/{turn}/place {rank}").decode())}
        store.set(f"{_NAME}/{turn}/seen {me}", ",".join(map(str, sorted(seen))))
        seen_by = {rank: store.get(f"{_NAME}/{turn}/seen {rank}").decode().split(",") for rank in others}
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return frozenset(rank for rank in seen if str(me) in seen_by[rank])


def _machine() -> str:
    """What ranks have in common that number processes alike and reach each other without a link."""
    spaces = (str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net"))
    return " ".join((Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces))


def _reads(place: str) -> bool:
    """Whether what another rank wrote stands there."""
    path, _, rest = place.partition(" ")
    token, _, machine = rest.partition(" ")
    with suppress(OSError):
        return bool(token) and machine == _machine() and Path(path).read_bytes() == token.encode()
    return False


class SharedChunk:
    """Memory of one sender and one receiver. Has state: how much was put in, and on its first bytes how much was taken
    out, which the receiver counts."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._map = mmap.mmap(descriptor, size)
        self._count = memoryview(self._map)[:8].cast("q")
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.put = 0
        self.end = _ALIGNED

    @classmethod
    def new(cls, size: int) -> SharedChunk:
        """One of at least `size` bytes."""
        size = max(CHUNK, size + _ALIGNED)
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, size)
        chunk = cls(descriptor, size)
        weakref.finalize(chunk, os.close, descriptor)
        return chunk

    @classmethod
    def seen(cls, process: int, descriptor: int) -> SharedChunk:
        """That of another process, or of another rank of this one."""
        duplicate = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
        try:
            return cls(duplicate, os.fstat(duplicate).st_size)
        finally:
            os.close(duplicate)

    @property
    def empty(self) -> bool:
        """Whether all that was put in has been taken out."""
        return bool(self._count[0] == self.put)

    def room(self, size: int) -> int | None:
        """Where `size` bytes have room; None: nowhere yet."""
        if self.empty:
            self.end = _ALIGNED
        return self.end if self.end + size <= self.size else None

    def write(self, tensor: Tensor, offset: int) -> None:
        """Puts a tensor in."""
        self.bytes[offset : offset + tensor.nbytes].copy_(_flat(tensor))
        self.put += tensor.nbytes
        self.end = offset + -(-tensor.nbytes // _ALIGNED) * _ALIGNED

    def read(self, room: Tensor, offset: int) -> None:
        """Takes a tensor out, into `room`."""
        _flat(room).copy_(self.bytes[offset : offset + room.nbytes])
        self._count[0] += room.nbytes


class IncomingMessages:
    """What one neighbour sends. Has state: chunks, rooms that wait for their word, words that wait for their room."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.lock = threading.Lock()
        self.chunks: dict[int, SharedChunk] = {}
        self.rooms: defaultdict[int, deque[tuple[Tensor, Hashable]]] = defaultdict(deque)
        self.words: defaultdict[int, deque[Sequence[int]]] = defaultdict(deque)

    def take(self, room: Tensor, word: Sequence[int]) -> None:
        """Reads what a word tells of. Called under the lock, so that the bytes are read before they are counted."""
        descriptor, offset, size = word
        assert size == room.nbytes, f"{size} bytes for {room.nbytes}"
        if size:
            if descriptor not in self.chunks:
                self.chunks[descriptor] = SharedChunk.seen(self.process, descriptor)
            self.chunks[descriptor].read(room, offset)


class SharedMemoryTransport(PeerMessages):
    """Messages of which those to and from neighbours go through shared memory. Has state: chunks, lines, and words that
    are not sent yet.

    Args:
        group: all its ranks make this together.
        near: the ranks that share memory with this one (`neighbours`).
    """

    def __init__(self, group: dist.ProcessGroup, near: frozenset[int]) -> None:
        super().__init__(group)
        store = group.get_group_store()
        me = group.rank()
        store.set(f"{_NAME}/process {me}", str(os.getpid()))
        self.near = near
        self._lines = {peer: IncomingMessages(int(store.get(f"{_NAME}/process {peer}"))) for peer in near}
        self._chunks: dict[int, list[SharedChunk]] = {peer: [] for peer in near}
        self._unsaid: dict[int, list[int]] = {peer: [] for peer in near}
        self._urgent = False
        self._ledger = getattr(group, "ledger", None)
        weakref.finalize(self, _leave, self._chunks)

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """See `Transport.send`; the word goes out with the next ones, at the latest before this rank waits."""
        if peer not in self.near:
            super().send(tensor, peer, tag)
            return
        tensor = tensor.contiguous()
        places = ((chunk, chunk.room(tensor.nbytes)) for chunk in self._chunks[peer])
        chunk, offset = next(((candidate, place) for candidate, place in places if place is not None), (None, _ALIGNED))
        if chunk is None:
            chunk = SharedChunk.new(tensor.nbytes)
            self._chunks[peer].append(chunk)
        chunk.write(tensor, offset)
        if self._ledger is not None:
            self._ledger.add(Traffic.EXPERTS._value_, "shared memory", float(tensor.nbytes))
        self._unsaid[peer] += (tag, chunk.descriptor, offset, tensor.nbytes)
        self._urgent = self._urgent or tag % 2 == 0
        if len(self._unsaid[peer]) == 4 * _WORDS:
            self._say(peer)

    def _say(self, peer: int) -> None:
        words = self._unsaid[peer]
        self._unsaid[peer] = []
        message = torch.zeros(1 + 4 * _WORDS, dtype=torch.int64)
        message[: len(words) + 1] = torch.tensor([len(words) // 4, *words])
        with traffic(Traffic.EXPERTS):
            signal = self._group.signal if isinstance(self._group, Channel) else self._group.send
            self._leaving.append((signal([message], peer, _TAG), message))

    def _say_all(self, least: int = 1) -> None:
        for peer, words in self._unsaid.items():
            if len(words) >= 4 * least:
                self._say(peer)

    def expect(self, room: Tensor, peer: int, tag: int, event: Hashable) -> None:
        if peer not in self.near:
            super().expect(room, peer, tag, event)
            return
        line = self._lines[peer]
        with line.lock:
            if line.words[tag]:
                line.take(room, line.words[tag].popleft())
                self._events.put(event)
                return
            line.rooms[tag].append((room, event))
        if (peer, 0) not in self._threads:
            thread = self._threads[peer, 0] = CommThread(f"experts of rank {peer}")
            weakref.finalize(self, thread.close)
        self._threads[peer, 0].put(partial(_listen, self._group, peer, line, self._events.put))

    def announce(self) -> None:
        self._say_all()

    def next(self, wait: bool) -> Any:
        self._say_all(1 if wait or self._urgent else _TOGETHER)
        self._urgent = False
        try:
            return super().next(wait)
        except BaseException:
            for chunks in self._chunks.values():
                chunks.clear()
            raise

    def ended(self) -> None:
        self._say_all()
        super().ended()


def _leave(chunks: dict[int, list[SharedChunk]]) -> None:
    """Waits a little for what is not read yet: a chunk can be opened as long as its sender has it open."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and not all(chunk.empty for every in chunks.values() for chunk in every):
        time.sleep(1e-3)


def _listen(group: Any, peer: int, line: IncomingMessages, put: Any) -> None:
    """Takes messages of a neighbour while something is expected of it; then none would come."""
    try:
        while True:
            with line.lock:
                if not any(line.rooms.values()):
                    return
            message = torch.empty(1 + 4 * _WORDS, dtype=torch.int64)
            with traffic(Traffic.EXPERTS):
                group.recv([message], peer, _TAG).wait()
            count, *words = message.tolist()
            with line.lock:
                for at in range(0, 4 * count, 4):
                    tag, *word = words[at : at + 4]
                    if line.rooms[tag]:
                        room, event = line.rooms[tag].popleft()
                        line.take(room, word)
                        put(event)
                    else:
                        line.words[tag].append(word)
    except BaseException as error:
        put(error)
        raise


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def links(group: dist.ProcessGroup) -> PeerMessages:
    """The transport for a group, of which all ranks call this: shared memory among those of one machine."""
    near = neighbours(group)
    return SharedMemoryTransport(group, near) if near else PeerMessages(group)
