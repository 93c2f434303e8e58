"""Bits of halo rows by crossing and pair: within the links' time, as many as go, more where errors reach farther."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.mechanisms.halo_exchange import halo_bits
from espalier.mechanisms.halo_exchange.halo_bits import Links, allotted, chosen_bytes

KEYS = [(1, False), (1, True), (2, False), (2, True)]
COLUMNS = {1: 64, 2: 16}


def case(seed, ranks):
    draw = np.random.default_rng(seed)
    nodes = np.sort(draw.integers(0, 3, ranks))
    nodes = np.unique(nodes, return_inverse=True)[1]
    rows = draw.integers(0, 400, (ranks, ranks)) * (1 - np.eye(ranks, dtype=int))
    bandwidth = draw.choice([1e4, 1e5, 1e6], (3, 3))
    links = Links(nodes, np.minimum(bandwidth, bandwidth.T)[nodes][:, nodes])
    counts = {key: rows.T if key[1] else rows for key in KEYS}

    def sent(key, bits):
        return counts[key] * (4.0 * COLUMNS[key[0]] if bits == 32 else 4 + bits * COLUMNS[key[0]] / 8)

    return links, counts, sent


def total(sent, found):
    return sum(chosen_bytes({one: sent(key, one) for one in (1, 2, 4, 8, 32)}, bits) for key, bits in found.items())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 5), share=st.floats(0.0, 1.2))
def test_links_are_within_their_time_and_nothing_more_goes(seed, ranks, share):
    links, counts, sent = case(seed, ranks)
    whole = links.seconds(sum(sent(key, 8) for key in KEYS))
    limit = share * whole
    found = allotted(counts, sent, links, limit)
    least = links.seconds(sum(sent(key, 1) for key in KEYS))
    assert links.seconds(total(sent, found)) <= max(limit, least) * (1 + 1e-9)
    pairs = links.nodes[:, None] * 10 + links.nodes[None]
    busy = links.busy(total(sent, found))
    for key, bits in found.items():
        for pair in np.unique(pairs):
            mask = (pairs == pair) & (counts[key] > 0)
            if not mask.any():
                continue
            (one,) = set(bits[mask].tolist())
            if one < 8:
                more = links.busy((sent(key, 2 * one) - sent(key, one)) * mask)
                full = [(a + b)[b > 0].max(initial=0.0) > limit * (1 - 1e-9) for a, b in zip(busy, more, strict=True)]
                assert any(full)


def test_slower_links_and_errors_that_reach_fewer_layers_have_fewer_bits():
    nodes, rows = np.arange(3), np.full((3, 3), 100) * (1 - np.eye(3, dtype=int))
    counts = dict.fromkeys(KEYS, rows)
    bandwidth = np.full((3, 3), 1e6)
    bandwidth[0, 1] = bandwidth[1, 0] = 1e5

    def sent(key, bits):
        return rows * (256.0 if bits == 32 else 4 + 8 * bits)

    links = Links(nodes, bandwidth)
    for share in np.linspace(0.1, 1.0, 10):
        found = allotted(counts, sent, links, share * links.seconds(4 * sent(KEYS[0], 8)))
        for layer in (1, 2):
            assert (found[layer, True] <= found[layer, False]).all()
        assert all((bits[0, 1] <= bits[0, 2]) and (bits[1, 0] <= bits[1, 2]) for bits in found.values())
    some = allotted(counts, sent, links, 0.5 * links.seconds(4 * sent(KEYS[0], 8)))
    assert len({int(bits[0, 1]) for bits in some.values()}) > 1
    assert all((bits == 32).all() for bits in allotted(counts, sent, links, 1e9).values())


@pytest.mark.parametrize("seed", range(5))
def test_the_error_is_near_the_least_of_all_choices(seed):
    """Two ranks: four crossings each way, tried all for one direction of the link."""
    draw = np.random.default_rng(seed)
    rows = np.array([[0, 300], [0, 0]])
    links = Links(np.arange(2), np.full((2, 2), 1e5))
    counts = dict.fromkeys(KEYS[:3], rows)
    columns = {key: int(draw.integers(8, 256)) for key in counts}

    def sent(key, bits):
        return rows * (4.0 * columns[key] if bits == 32 else 4 + bits * columns[key] / 8)

    def error(found):
        return sum(halo_bits.weight(key, 3) * (2.0**bits - 1) ** -2.0 for key, bits in found.items())

    limit = draw.uniform(0.3, 0.9) * links.seconds(sum(sent(key, 8) for key in counts))
    found = {key: int(bits[0, 1]) for key, bits in allotted(counts, sent, links, limit).items()}
    every = np.stack(np.meshgrid(*[halo_bits.LEVELS] * 3), -1).reshape(-1, 3)
    fits = [
        error(dict(zip(counts, map(int, one), strict=True)))
        for one in every
        if links.seconds(sum(sent(key, int(bits)) for key, bits in zip(counts, one, strict=True))) <= limit
    ]
    assert error(found) <= 1.3 * min(fits) + 0.02
