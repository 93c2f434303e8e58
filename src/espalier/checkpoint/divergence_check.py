"""Silent-data-corruption check: compares hashes of replicated state before every copy and every save.

A processor or memory that gets something wrong without a word (Hochschild et al., "Cores that don't count", HotOS 2021)
makes one rank's state another, and its gradients spoil everybody's from then on. So what was kept while all were alike
is good, and what came after is not. Each rank hashes what it holds; for a copy in memory the hashes travel in a sum, as
gradients do, for a checkpoint in the thread that writes it, so that training does not stand still for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
import torch
import xxhash
from torch import Tensor

from espalier.checkpoint import state_tree
from espalier.checkpoint.coordination import Coordinator
from espalier.machine import resource_limits
from espalier.recipe.errors import Corrupted, Diverged, PeerLost

_DIGITS = 8  # of 16 bits each: sums of them are exact in float64


def make() -> str:
    """What the last bits of a rank's results depend on, besides its code and data: which instructions it has, and how
    elements are divided among its threads."""
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return f"{resource_limits.processor()} ({capability}, {threads} thread{'s' * (threads > 1)})"


Digest = tuple[int, ...]


def digest(tensors: state_tree.KeptTensors, besides: Collection[str] = ()) -> Digest:
    """[8] the XXH3-128 of this rank's elements of `tensors`, `besides` those of some names, in their order, as numbers
    of 16 bits."""
    hasher = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        if name in besides:
            continue
        local = state_tree.local(tensor).cpu().contiguous()
        hasher.update(local.reshape(-1).view(torch.uint8).numpy().data)
    return tuple(np.frombuffer(hasher.digest(), dtype=np.uint16).tolist())


def strangers(given: Sequence[object]) -> tuple[list[int], bool]:
    """Which ranks have given something else than most; and whether more than half gave the same, so that these are
    right.

    >>> strangers([1, 1, 2])
    ([2], True)
    >>> strangers([1, 2])
    ([1], False)
    """
    (usual, count), *_ = Counter(given).most_common()
    return [rank for rank, digits in enumerate(given) if digits != usual], 2 * count > len(given)


class Alike:
    """Compares what ranks hold. Has state: whether it is still known to be good.

    Args:
        rank, world: this rank, of how many.
        mean: replaces a tensor by its mean over all ranks, in place.
        besides: names of tensors that ranks may hold each their own of, as running statistics.
    """

    def __init__(
        self, rank: int, world: int, mean: Callable[[Tensor], None], besides: Collection[str] = frozenset()
    ) -> None:
        self._rank = rank
        self._world = world
        self._mean = mean
        self.besides = besides
        self.good = True
        """False once ranks were found to differ: what they hold is not to be kept."""

    def compare(self, tensors: state_tree.KeptTensors) -> None:
        """All ranks call it with what they hold after the same step.

        Raises:
            Corrupted: this rank holds something else than most.
            Diverged: the ranks do not hold the same, and it cannot be said which of them are right.
            PeerLost: another rank holds something else than most.
        """
        digests = torch.zeros(self._world, _DIGITS, dtype=torch.float64)
        digests[self._rank] = torch.tensor(digest(tensors, self.besides), dtype=torch.float64)
        self._mean(digests)
        self._judge([tuple(row) for row in (digests * self._world).round().tolist()])

    def agreed(self, team: Coordinator, tensors: state_tree.KeptTensors) -> None:
        """As `compare`, but the ranks agree as `team`, which may be another thread's."""
        local_digest = partial(digest, tensors, self.besides)
        self._judge(team.agree("comparing what ranks hold", local_digest, lambda all_: [all_] * len(all_)))

    def _judge(self, given: Sequence[tuple[float, ...]]) -> None:
        odd, known = strangers(given)
        if odd:
            self.good = False
            raise self._error(odd, known)

    def _error(self, odd: Sequence[int], known: bool) -> Corrupted | PeerLost:
        if not known:
            return Diverged("Ranks no longer hold the same, and nobody knows which of them are right.", why=_WHY)
        if self._rank in odd:
            return Corrupted(f"Rank {self._rank} no longer holds what the others do.", why=_WHY)
        names = " and ".join(f"rank {rank}" for rank in odd)
        return PeerLost(f"This rank leaves, as {names} no longer holds what the others do.")


_WHY = "all ranks have the same parameters and optimizer states in this plan, and their hashes differ"
