from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.language import mixture
from espalier.language.mixture import SampleOrder, documents, held_out, permute, read_windows
from espalier.language.token_store import build
from espalier.recipe import Data
from espalier.recipe.errors import UserError

seeds = st.integers(-(2**63), 2**64)
weight_lists = st.lists(
    st.one_of(st.integers(1, 50), st.sampled_from([0.1, 0.25, 0.7, 1.5]), st.floats(1e-3, 10)), min_size=1, max_size=8
)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection_for_any_size_and_key(size, key):
    image = permute(np.arange(size), size, np.array([key], np.uint64))
    assert sorted(image.tolist()) == list(range(size))


@given(size=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), places=st.lists(st.integers(0, 2**62), max_size=20))
def test_permute_stays_in_range_and_injective_at_any_size(size, key, places):
    places = sorted({place % size for place in places})
    image = permute(np.array(places, np.int64), size, np.array([key], np.uint64))
    assert ((image >= 0) & (image < size)).all()
    assert len(set(image.tolist())) == len(places)


def test_permutations_look_random():
    size, keys = 101, 4000
    place = np.repeat(np.arange(3), keys)
    image = permute(place, size, np.tile(np.arange(keys, dtype=np.uint64), 3)).reshape(3, keys)
    counts = np.stack([np.bincount(row, minlength=size) for row in image])
    chi_square = ((counts - keys / size) ** 2 / (keys / size)).sum(axis=1)
    assert (chi_square < 160).all()  # 100 degrees of freedom: above 160 once in ten thousand
    assert abs(np.corrcoef(image[0], image[1])[0, 1]) < 0.06


@given(tokens=st.integers(18, 3000), sequence=st.integers(1, 17), seed=seeds, epoch=st.integers(0, 5))
def test_every_epoch_visits_every_window_once_without_overlap(tokens, sequence, seed, epoch):
    order = SampleOrder([tokens], [1.0], sequence, seed)
    size = order.windows[0]
    one = order.samples(epoch * size, (epoch + 1) * size)
    assert sorted(one.window.tolist()) == list(range(size))
    assert set(one.epoch.tolist()) == {epoch}
    starts = np.sort(one.start)
    assert (np.diff(starts) == sequence).all()
    assert starts[0] >= 0
    assert starts[-1] + sequence + 1 <= tokens
    assert size * sequence >= tokens - 2 * sequence  # at most two windows' worth of tokens sits out an epoch


def test_window_edges_and_order_differ_between_epochs_and_seeds():
    order = SampleOrder([10_000], [1.0], 64, seed=1)
    size = order.windows[0]
    epochs = [order.samples(epoch * size, (epoch + 1) * size) for epoch in range(8)]
    assert len({tuple(one.window.tolist()) for one in epochs}) == 8
    assert len({int(one.start.min()) for one in epochs}) > 4
    other = SampleOrder([10_000], [1.0], 64, seed=2).samples(0, size)
    assert other.window.tolist() != epochs[0].window.tolist()


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.lists(st.integers(100, 5000), min_size=1, max_size=4),
    seed=seeds,
    cuts=st.lists(st.integers(0, 600), max_size=6),
)
def test_any_division_among_ranks_gives_the_same_whole(tokens, seed, cuts):
    order = SampleOrder(tokens, [1.0 + number for number in range(len(tokens))], 16, seed)
    whole = order.samples(0, 600)
    edges = sorted({0, 600, *cuts})
    parts = [order.samples(start, stop) for start, stop in pairwise(edges)]
    for field in range(4):
        np.testing.assert_array_equal(np.concatenate([part[field] for part in parts]), whole[field])
    last = order.samples(599, 600)
    assert (last.source[0], last.window[0]) == (whole.source[-1], whole.window[-1])
    fresh = SampleOrder(tokens, [1.0 + number for number in range(len(tokens))], 16, seed)
    np.testing.assert_array_equal(fresh.samples(300, 600).start, whole.start[300:])


@settings(deadline=None, max_examples=40)
@given(weights=weight_lists, start=st.integers(0, 2**40))
def test_every_source_stays_within_one_sample_of_its_share(weights, start):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "LONGEST_PERIOD", 1000)
        order = SampleOrder([1000] * len(weights), weights, 16, 0)
    shares = np.array(order.shares)
    n = np.arange(2 * order.period + 1)[:, None]
    chosen = order.samples(0, 2 * order.period).source
    given_ = np.zeros((2 * order.period + 1, len(weights)), np.int64)
    given_[1:] = np.cumsum(chosen[:, None] == np.arange(len(weights)), axis=0)
    assert (abs(given_ * order.period - n * shares) < order.period).all()
    far = order.samples(start, start + order.period).source  # of a whole period, wherever it begins
    assert np.bincount(far, minlength=len(weights)).tolist() == list(order.shares)


@given(weights=weight_lists)
def test_shares_are_the_weights(weights):
    shares = mixture._shares(weights, [""] * len(weights))
    exact = [Fraction(repr(float(weight))) for weight in weights]
    assert sum(shares) <= mixture.LONGEST_PERIOD
    for share, weight in zip(shares, exact, strict=True):
        error = abs(Fraction(share, sum(shares)) - weight / sum(exact))
        assert error <= Fraction(len(weights), mixture.LONGEST_PERIOD)


def test_the_longest_period_keeps_its_bound():
    order = SampleOrder([1000] * 4, [0.1234567, 3.3333333, 1.0000001, 0.5], 16, 0)
    assert order.period > mixture.LONGEST_PERIOD // 2
    given_ = np.cumsum(order.samples(0, order.period).source[:, None] == np.arange(4), axis=0)
    n = np.arange(1, order.period + 1)[:, None]
    assert (abs(given_ * order.period - n * np.array(order.shares)) < order.period).all()


def test_plain_weights_are_exact_and_repeat_soon():
    assert SampleOrder([100] * 2, [0.7, 0.3], 16, 0).shares == (7, 3)
    assert SampleOrder([100] * 3, [2, 1, 1], 16, 0).shares == (2, 1, 1)
    assert SampleOrder([100] * 2, [1e9, 1e-9], 16, 0).shares == (mixture.LONGEST_PERIOD - 1, 1)


@settings(deadline=None, max_examples=30)
@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=seeds)
def test_each_source_goes_through_its_own_epochs_in_a_mixture(weights, seed):
    tokens = [200 + 50 * number for number in range(len(weights))]
    order = SampleOrder(tokens, weights, 16, seed)
    whole = order.samples(0, 400)
    for number in range(len(weights)):
        mine = whole.source == number
        windows, size = whole.window[mine], order.windows[number]
        for start in range(0, len(windows) - size + 1, size):
            assert sorted(windows[start : start + size].tolist()) == list(range(size))


def test_far_samples_cost_no_scan():
    order = SampleOrder([10**12, 10**9], [0.9, 0.1], 2048, 1)
    one = order.samples(10**15, 10**15 + 4)
    assert (one.start + 2049 <= np.array([10**12, 10**9])[one.source]).all()


def test_a_source_shorter_than_a_window_names_what_fits():
    with pytest.raises(
        UserError, match=r"train\.sequence = 256 is longer than corpus/, which has 100 tokens"
    ) as caught:
        SampleOrder([1000, 100], [1, 1], 256, 0, ["other", "corpus/"])
    assert "train.sequence = 99 or less" in caught.value.do
    assert SampleOrder([100], [1], 99, 0).windows == (1,)
    assert SampleOrder([100], [1], 99, 0).samples(5, 6)[:2] == (0, 0)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(UserError, match=r"data\.weight = .* of b"):
        SampleOrder([100, 100], [1.0, weight], 10, 0, ["a", "b"])


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    found = []
    for name in ("left", "right"):
        folder = tmp_path_factory.mktemp(name)
        (folder / "corpus").mkdir()
        for number in range(12):
            (folder / "corpus" / f"{name}{number}.txt").write_text(f"{name} {number}\n" * (number + 3))
        found.append(build(Data(path=str(folder / "corpus"), validation=0.3), folder / "cache"))
    return found


def test_windows_are_the_tokens_of_the_store(stores):
    splits = [store.train for store in stores]
    order = SampleOrder([split.tokens for split in splits], [2, 1], 24, 7, ["l", "r"])
    windows = read_windows(splits, order, 5, 45)
    assert windows.shape == (40, 25)
    assert windows.dtype == np.int64
    chosen = order.samples(5, 45)
    for window, source, start in zip(windows, chosen.source, chosen.start, strict=True):
        np.testing.assert_array_equal(window, splits[source].read(int(start), 25))
    np.testing.assert_array_equal(np.concatenate([read_windows(splits, order, 5, 20), windows[15:]]), windows)
    assert read_windows(splits, order, 5, 5).shape == (0, 25)


def test_documents_of_a_batch_are_named_once_with_their_source(stores):
    splits = [store.train for store in stores]
    order = SampleOrder([split.tokens for split in splits], [1, 1], 24, 7, ["l", "r"])
    names = documents(splits, order, 0, 30)
    assert len(names) == len(set(names)) > 4
    assert all(name.startswith(("l: left", "r: right")) for name in names)
    single = SampleOrder([splits[0].tokens], [1], 24, 7)
    start = int(single.samples(0, 1).start[0])
    assert documents(splits[:1], single, 0, 1) == splits[0].documents_in(start, start + 25)


@given(tokens=st.integers(1, 5000), sequence=st.integers(1, 100), limit=st.integers(1, 6000))
def test_held_out_windows_are_disjoint_spread_and_bounded(tokens, sequence, limit):
    split = SimpleNamespace(tokens=tokens)
    if tokens <= sequence:
        with pytest.raises(UserError, match=r"held-out part of data\.path"):
            held_out(split, sequence, limit)
        return
    starts = held_out(split, sequence, limit)
    assert len(starts) == min((tokens - 1) // sequence, max(1, limit // sequence))
    assert (np.diff(starts) >= sequence).all()
    assert starts[0] == 0
    assert starts[-1] + sequence + 1 <= tokens
    if len(starts) > 1:
        assert np.ptp(np.diff(starts)) <= sequence
