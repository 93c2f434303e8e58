"""The global order of samples as a pure function of (seed, n): no reader has a state, and ranks play no part in it.

Sample n names a source and a window of `sequence + 1` tokens. Which source: a schedule in which every source is always
within one sample of its share (after Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).
Which window: each source's windows in a fresh pseudo-random order every epoch (a Feistel network with cycle walking,
after Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), their edges shifted every epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.kernels.split_mix import mixed
from espalier.language.token_store import TokenSplit
from espalier.recipe.errors import UserError

Int64 = NDArray[np.int64]
_Word = NDArray[np.uint64]

LONGEST_PERIOD = 1 << 14
"""Samples after which the schedule of sources repeats, at most. Weights without so small a common denominator are
rounded to multiples of its inverse."""

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: Weyl step of splitmix64 (Steele et al. 2014)
_WORD = (1 << 64) - 1


class MixtureSamples(NamedTuple):
    """Consecutive samples, each field int64 [samples]: their source, their window in that source's epoch, its epoch,
    and the token position `start` at which the window begins."""

    source: Int64
    window: Int64
    epoch: Int64
    start: Int64


class SampleOrder:
    """The order of all samples of a run. Immutable.

    `shares` are the exact shares of the sources as multiples of 1/`period`; `windows` the samples per epoch of each.
    """

    def __init__(
        self, tokens: Sequence[int], weights: Sequence[float], sequence: int, seed: int, names: Sequence[str] = ()
    ) -> None:
        """`tokens` and `weights` per source; `names` for messages.

        Raises UserError for a source shorter than one window, or a weight that is not a positive number.
        """
        assert len(tokens) == len(weights) > 0
        assert sequence > 0
        self.names = tuple(names) or tuple(f"source {number}" for number in range(len(tokens)))
        for name, count in zip(self.names, tokens, strict=True):
            _fits(name, count, sequence)
        self.sequence = sequence
        self.seed = seed
        self.shares = _shares(weights, self.names)
        self.period = sum(self.shares)
        # One window less than would fit leaves room for the shift, except in a source of a single window.
        self.windows = tuple(max(1, (count - sequence) // sequence) for count in tokens)
        room = zip(tokens, self.windows, strict=True)
        self._shifts = tuple(min(sequence, count - windows * sequence) for count, windows in room)
        self._turns = _schedule(self.shares)
        self._before = np.empty_like(self._turns)
        """How often each turn's own source came before it, int64 [period]."""
        for source in range(len(self.shares)):
            mine = np.flatnonzero(self._turns == source)
            self._before[mine] = np.arange(mine.size)

    def samples(self, start: int, stop: int) -> MixtureSamples:
        """Samples `[start, stop)` of the global order."""
        assert 0 <= start <= stop
        cycle, turn = np.divmod(np.arange(start, stop, dtype=np.int64), self.period)
        source = self._turns[turn]
        ordinal = cycle * np.array(self.shares, np.int64)[source] + self._before[turn]
        window = np.empty_like(source)
        epoch = np.empty_like(source)
        first = np.empty_like(source)
        for number in np.unique(source):
            mine = np.flatnonzero(source == number)
            epoch[mine], place = np.divmod(ordinal[mine], self.windows[number])
            apart = _mix(_mix(np.array([self.seed & _WORD], np.uint64)) + np.uint64(int(number) * _GOLDEN & _WORD))
            key = _mix(epoch[mine].astype(np.uint64) ^ apart)  # seeds and sources first, then epochs
            window[mine] = permute(place, self.windows[number], key)
            shift = (_mix(key) % np.uint64(self._shifts[number])).astype(np.int64)
            first[mine] = shift + window[mine] * self.sequence
        return MixtureSamples(source, window, epoch, first)


def permute(place: Int64, size: int, key: _Word) -> Int64:
    """A bijection of `[0, size)` chosen by `key` (per element, or one for all), applied to each of `place`."""
    bits = max(2, (size - 1).bit_length())
    word = place.astype(np.uint64)
    key = np.broadcast_to(key, place.shape)
    left = np.arange(place.size)
    while left.size:  # values that fell outside walk on along their cycle; under two rounds are expected
        word[left] = _feistel(word[left], bits, key[left])
        left = left[word[left] >= np.uint64(size)]
    return word.astype(np.int64)


def read_windows(splits: Sequence[TokenSplit], order: SampleOrder, start: int, stop: int) -> Int64:
    """Tokens of samples `[start, stop)`, int64 [samples, sequence + 1]: inputs are `[:, :-1]`, targets `[:, 1:]`."""
    chosen = order.samples(start, stop)
    out = np.empty((stop - start, order.sequence + 1), np.int64)
    for row, source, first in zip(out, chosen.source.tolist(), chosen.start.tolist(), strict=True):
        row[:] = splits[source].read(first, order.sequence + 1)
    return out


def documents(splits: Sequence[TokenSplit], order: SampleOrder, start: int, stop: int) -> list[str]:
    """Names of the documents in samples `[start, stop)`, each once, in order; of a mixture, with their source."""
    chosen = order.samples(start, stop)
    unique: dict[str, None] = {}
    for source, first in zip(chosen.source.tolist(), chosen.start.tolist(), strict=True):
        prefix = f"{order.names[source]}: " if len(splits) > 1 else ""
        names = splits[source].documents_in(first, first + order.sequence + 1)
        unique.update(dict.fromkeys(prefix + name for name in names))
    return list(unique)


def held_out(split: TokenSplit, sequence: int, limit: int, name: str = "data.path") -> Int64:
    """Starts of the validation windows, int64 [windows]: disjoint, evenly spread over `split`, at most `limit` tokens
    (at least one window). Each is read as `split.read(start, sequence + 1)`.

    Raises UserError when not even one window fits.
    """
    _fits(f"the held-out part of {name}", split.tokens, sequence, "or raise data.validation")
    windows = (split.tokens - 1) // sequence
    taken = min(windows, max(1, limit // sequence))
    return np.arange(taken, dtype=np.int64) * windows // taken * sequence


def _fits(name: str, tokens: int, sequence: int, otherwise: str = "or add data") -> None:
    if tokens < sequence + 1:
        fitting = f"train.sequence = {tokens - 1} or less" if tokens > 1 else "a larger source"
        raise UserError(
            f"train.sequence = {sequence} is longer than {name}, which has {tokens} tokens.",
            why=f"one sample takes {sequence + 1} tokens",
            do=f"{fitting}, {otherwise}",
        )


# Which source


def _shares(weights: Sequence[float], names: Sequence[str]) -> tuple[int, ...]:
    """Whole numbers in proportion to `weights`, without a common divisor, of a sum up to LONGEST_PERIOD."""
    for name, weight in zip(names, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(
                f"data.weight = {weight} of {name}: a weight is a positive number.",
                do="remove the [[data]] table, or give it a weight such as 1.0",
            )
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.7 is meant as 7/10
    scale = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * scale) for share in exact]
    divisor = math.gcd(*whole)
    whole = [share // divisor for share in whole]
    return tuple(whole) if sum(whole) <= LONGEST_PERIOD else _rounded(whole)


def _rounded(whole: Sequence[int]) -> tuple[int, ...]:
    """Largest-remainder rounding to a sum of LONGEST_PERIOD; nobody gets nothing."""
    ideal = [Fraction(share * LONGEST_PERIOD, sum(whole)) for share in whole]
    shares = [max(1, int(share)) for share in ideal]
    by_need = sorted(range(len(whole)), key=lambda number: shares[number] - ideal[number])
    missing = LONGEST_PERIOD - sum(shares)
    for number in by_need[: max(0, missing)]:
        shares[number] += 1
    largest = max(range(len(whole)), key=lambda number: whole[number])
    shares[largest] += min(0, missing)
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares)


def _schedule(shares: Sequence[int]) -> Int64:
    """The source of each turn of one period, int64 [period]: of those that may take the turn, the one soonest late.

    Every prefix of n turns gives source k within 1 - 1/(2K - 2) of n·share_k/period turns.
    """
    period, spread = sum(shares), 2 * len(shares) - 2
    given = [0] * len(shares)
    turns = np.zeros(period, np.int64)
    for turn in range(1, period + 1) if spread else ():
        owed = [share * turn - done * period for share, done in zip(shares, given, strict=True)]
        may = [number for number, debt in enumerate(owed) if debt * spread >= period]
        chosen = min(may, key=lambda number: ((spread - 1) * period - spread * owed[number]) / shares[number])
        turns[turn - 1] = chosen
        given[chosen] += 1
    return turns


# Which window


def _feistel(word: _Word, bits: int, key: _Word) -> _Word:
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high = word >> low_bits
    low = word & low_mask
    for turn in range(0, _ROUNDS, 2):
        high = high ^ (_mix(low ^ (key + np.uint64(turn * _GOLDEN & _WORD))) & high_mask)
        low = low ^ (_mix(high ^ (key + np.uint64((turn + 1) * _GOLDEN & _WORD))) & low_mask)
    return (high << low_bits) | low


def _mix(word: Any) -> Any:
    """splitmix64's finalizer: every output bit depends on every input bit. Arrays only: scalars warn on overflow."""
    return mixed(word + np.uint64(_GOLDEN))
