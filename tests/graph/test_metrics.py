"""Figures of merit beside their definitions, and parts that add up to the whole."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.graph.tasks import metrics


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_area_is_the_share_of_pairs_in_order(items):
    scores = torch.tensor([float(score) for score, _ in items])
    labels = torch.tensor([float(label) for _, label in items])
    ones, zeros = ([s for s, label in items if label == want] for want in (True, False))
    found = metrics.area(scores, labels)
    if not ones or not zeros:
        assert math.isnan(found)
        return
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in itertools.product(ones, zeros)]
    assert found == pytest.approx(sum(pairs) / len(pairs))


def test_figures_of_parts_add_up():
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 4), torch.randint(-1, 4, (50,))
    whole = metrics.classified(logits, labels)
    parts = [metrics.classified(logits[at : at + 20], labels[at : at + 20]) for at in (0, 20, 40)]
    for name, (total, weight) in whole.items():
        assert sum(part[name][0] for part in parts) == pytest.approx(total, rel=1e-5)
        assert sum(part[name][1] for part in parts) == weight
    found = metrics.summary({name: total / weight for name, (total, weight) in whole.items()})
    known = labels >= 0
    guess = logits.argmax(1)
    assert found["accuracy"] == pytest.approx(float((guess == labels)[known].float().mean()))
    scores = []
    for at in range(4):
        hit = float(((guess == at) & (labels == at)).sum())
        scores.append(2 * hit / float(((guess == at) & known).sum() + (labels == at).sum()))
    assert found["f1"] == pytest.approx(sum(scores) / 4)


def test_ranks_of_true_links():
    true = torch.tensor([3.0, 1.0, 2.0])
    others = torch.tensor([[1.0, 2.0], [5.0, 0.0], [2.0, 0.0]])
    found = metrics.ranked(true, others)
    assert found["mrr"] == (pytest.approx(1 + 1 / 2 + 1 / 1.5), 3.0)
    assert found["hits@1"] == (1.0, 3.0)
    assert found["auc"] == (pytest.approx(1 + 0.5 + 0.75), 3.0)


def test_unknown_answers_are_not_counted():
    logits = torch.tensor([[1.0, -1.0], [-2.0, 3.0]])
    labels = torch.tensor([[1.0, float("nan")], [1.0, 1.0]])
    assert metrics.marked(logits, labels)["accuracy"] == (2.0, 3.0)
    assert metrics.summary({"auc": float("nan"), "loss": 1.0}) == {"loss": 1.0}
