"""How fast are the links? Latency, bandwidth and the price of a launch for every pair of ranks of a process group.

Ping-pong of a small and of a large message for each pair, one pair after the other; the launch price is what a small
all-reduce costs beyond its hops. What a large one costs says how much of the slowest link sums reach: ranks send,
receive and add at once, on processors that may be slower than the link. A pair whose repeated transfers fall into two
groups (two routes, a shared link) is flagged, after the survey arXiv 2407.20018, section on congestion.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from espalier.kernels import accelerator
from espalier.machine.cluster import Link, Pair

SMALL = 8
LARGE = 4 * 2**20
TRIED = 2**18
"""Bytes of the transfer that says how slow a link is: more than a token bucket of 64 KiB lets through at once."""
TRANSFER_SECONDS, PAIR_SECONDS = 0.25, 4.0
"""What one transfer, and all large ones of a pair together, are meant to take on a slow link: at 50 Mbit/s a transfer
of 0.25 s is 1.5 MB, of which a bucket of 64 KiB is 4 %."""


@dataclass(frozen=True)
class Matrix:
    """Measured links of `n` ranks, each array [n, n], symmetric; the diagonals mean nothing."""

    latency: NDArray[np.float64]
    """Seconds one way."""
    bandwidth: NDArray[np.float64]
    """Bytes/s one way."""
    launch: float
    """Seconds per collective beyond its hops."""
    bimodal: NDArray[np.bool_]
    """Pairs whose transfers came at two speeds."""
    share: float = 0.0
    """Of the slowest pair's bandwidth, what an all-reduce over all ranks reaches; 0: not measured."""

    def link(self, a: int, b: int) -> Link:
        """The link between ranks `a` and `b`."""
        return Link(
            bandwidth=float(self.bandwidth[a, b]),
            latency=float(self.latency[a, b]),
            launch=self.launch,
            share=self.share,
            measured=True,
            source="probe: ping-pong and small all-reduce",
        )

    def pairs(self, devices: Sequence[int] | None = None) -> tuple[Pair, ...]:
        """All pairs, for a cluster file; `devices[rank]` is a rank's device there (default: the same number)."""
        number = list(devices) if devices is not None else list(range(len(self.latency)))
        return tuple(
            Pair(number[a], number[b], float(self.bandwidth[a, b]), float(self.latency[a, b]), self.launch, self.share)
            for a, b in itertools.combinations(range(len(number)), 2)
        )

    def notes(self) -> tuple[str, ...]:
        """One sentence for each pair whose transfers came at two speeds."""
        pairs = np.argwhere(np.triu(self.bimodal))
        return tuple(f"link {a}-{b}: repeated transfers fall into two groups of different speed" for a, b in pairs)


def measure(group: dist.ProcessGroup | None = None, *, large: int = LARGE, repeats: int = 12) -> Matrix:
    """Measures all links of `group` (default: all ranks). Every rank calls it; every rank gets the same matrix.

    Takes about `repeats`·(4·latency + 2·large/bandwidth) for each pair; where that were more than `PAIR_SECONDS`,
    messages are smaller and fewer. Waits are bounded by the group's own timeout.
    """
    rank, ranks, device = dist.get_rank(group), dist.get_world_size(group), _device(group)
    rows = torch.zeros(3, ranks, ranks, dtype=torch.float64)
    for a, b in itertools.combinations(range(ranks), 2):
        dist.barrier(group=group)
        if rank in (a, b):
            small = _ping_pong(group, (a, b), torch.zeros(SMALL, dtype=torch.uint8, device=device), repeats)
            size, times = _affordable(group, (a, b), device, large, repeats)
            big = _ping_pong(group, (a, b), torch.zeros(size, dtype=torch.uint8, device=device), times)
            if rank == a:
                rows[:, a, b] = rows[:, b, a] = torch.tensor(_fit(small, big, size), dtype=torch.float64)
    launch = _launch(group, device, repeats) if ranks > 1 else 0.0
    everything = torch.cat([rows.flatten(), torch.tensor([launch if rank == 0 else 0.0], dtype=torch.float64)])
    everything = everything.to(device)
    dist.all_reduce(everything, group=group)
    table = everything[:-1].reshape(rows.shape).cpu().numpy()
    hops = 2 * (ranks - 1) * float(table[0].max())
    fixed = float(everything[-1])
    share = 0.0
    if ranks > 1:
        apart = ~np.eye(ranks, dtype=bool)
        share = _share(group, device, float(table[1][apart].min()), fixed, large)
    return Matrix(table[0], table[1], max(0.0, fixed - hops), table[2] > 0, share)


def bimodal(times: Sequence[float]) -> bool:
    """Whether repeated transfers fall into two groups: each at least a fifth of all, the slow one 1.5 times the fast,
    and the gap between them three times the spread within either.
    """
    ordered = np.sort(np.asarray(times, dtype=np.float64))
    few = max(2, -(-len(ordered) // 5))
    if len(ordered) < 2 * few:
        return False
    gaps = np.diff(ordered)[few - 1 : len(ordered) - few]
    cut = few + int(np.argmax(gaps))
    fast, slow = ordered[:cut], ordered[cut:]
    spread = max(float(np.ptp(fast)), float(np.ptp(slow)))
    return bool(np.median(slow) > 1.5 * np.median(fast) and slow[0] - fast[-1] > 3 * spread)


def _fit(small: Sequence[float], large: Sequence[float], size: int) -> tuple[float, float, float]:
    """(latency, bandwidth, two speeds) from round trips of a small and of a large message.

    Latency is the least seen, since waiting for a busy processor is no link; bandwidth is the usual one.
    """
    latency = float(np.min(small)) / 2
    whole = float(np.median(large)) / 2
    return latency, size / max(whole - latency, 1e-9), float(bimodal(large))


def affordable(seconds: float, tried: int, large: int, repeats: int) -> tuple[int, int]:
    """Bytes and repeats for a link on which `tried` bytes took `seconds` there and back: as asked on a fast one."""
    each = max(seconds / 2 / tried, 1e-12)
    size = min(large, max(tried, int(TRANSFER_SECONDS / each)))
    return size, min(repeats, max(3, int(PAIR_SECONDS / (2 * size * each)) - 2))


def _affordable(
    group: dist.ProcessGroup | None, pair: tuple[int, int], device: torch.device, large: int, repeats: int
) -> tuple[int, int]:
    """`affordable`, as the pair's first rank finds it in two tries: the first of them opens a connection, which is slow
    to begin."""
    size, times = min(TRIED, large), repeats
    for _ in range(2):
        tried = torch.zeros(size, dtype=torch.uint8, device=device)
        seconds = _ping_pong(group, pair, tried, 1, warm=0)
        measure = torch.tensor(affordable(seconds[0], size, large, repeats), dtype=torch.int64, device=device)
        if dist.get_rank(group) == pair[0]:
            dist.send(measure, group=group, group_dst=pair[1])
        else:
            dist.recv(measure, group=group, group_src=pair[0])
        size, times = int(measure[0]), int(measure[1])
    return size, times


def _ping_pong(
    group: dist.ProcessGroup | None, pair: tuple[int, int], message: torch.Tensor, repeats: int, warm: int = 2
) -> list[float]:
    """Seconds of each round trip, as the pair's first rank sees them; `warm` more go before as warm-up."""
    first, second = pair
    times = []
    for _ in range(repeats + warm):
        begin = time.perf_counter()
        if dist.get_rank(group) == first:
            dist.send(message, group=group, group_dst=second)
            dist.recv(message, group=group, group_src=second)
        else:
            dist.recv(message, group=group, group_src=first)
            dist.send(message, group=group, group_dst=first)
        _wait(message)
        times.append(time.perf_counter() - begin)
    return times[warm:]


def _launch(group: dist.ProcessGroup | None, device: torch.device, repeats: int) -> float:
    """Seconds of an all-reduce of nothing: the intercept of a line through small sizes, weighted by relative error."""
    sizes = np.array([4, 4096, 16384, 65536])
    times = np.array([_median(lambda t: dist.all_reduce(t, group=group), int(s), device, repeats) for s in sizes])
    slope_and_intercept = np.polyfit(sizes, times, 1, w=1 / times)
    return max(0.0, float(slope_and_intercept[1]))


def _share(group: dist.ProcessGroup | None, device: torch.device, bandwidth: float, fixed: float, large: int) -> float:
    """Of `bandwidth` (bytes/s), what an all-reduce of `large` bytes, or of what a link carries in `TRANSFER_SECONDS`,
    reaches beyond its `fixed` seconds: at most 1. Of the slowest rank, as all have to know the same."""
    ranks = dist.get_world_size(group)
    size = max(4, min(large, int(TRANSFER_SECONDS * bandwidth)) // 4 * 4)
    taken = _median(lambda t: dist.all_reduce(t, group=group), size, device, 3) - fixed
    share = min(1.0, 2 * (ranks - 1) / ranks * size / bandwidth / max(taken, 1e-9))
    least = torch.tensor([share], dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return float(least)


def _median(run: Callable[[torch.Tensor], Any], size: int, device: torch.device, repeats: int) -> float:
    message = torch.zeros(size // 4, dtype=torch.float32, device=device)
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        run(message)
        _wait(message)
        times.append(time.perf_counter() - begin)
    return float(np.median(times[2:]))


def _device(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return accelerator.current()
    return torch.device("cpu")


def _wait(message: torch.Tensor) -> None:
    if accelerator.is_on(message):
        accelerator.synchronize(message.device)
