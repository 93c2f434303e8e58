"""Templates: lines that differ in figures are one, other lines are not, and their number is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.resilience.acme import templates
from espalier.resilience.acme.templates import Templates


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=20))
def test_figures_make_no_new_template(numbers):
    tree = Templates()
    found = {
        id(tree.add(f"step {number} of run r{number:03d}x took {number / 7:.3f} ms at 0x{number:x}"))
        for number in numbers
    }
    assert len(found) == 1


def test_words_that_differ_become_wild():
    tree = Templates()
    one = tree.add("worker alpha lost its connection to the store")
    assert tree.add("worker beta lost its connection to the store") is one
    assert str(one) == "worker * lost its connection to the store"


@pytest.mark.parametrize("other", ["KeyError: 'k'", "worker lost", "a b c d e f g h", ""])
def test_other_lines_are_other_templates(other):
    tree = Templates()
    assert tree.add(other) is not tree.add("worker alpha lost its connection to the store")


def test_the_number_of_templates_is_bounded(monkeypatch):
    monkeypatch.setattr(templates, "MOST", 50)
    tree = Templates()
    for at in range(2000):
        tree.add(
            " ".join(
                f"w{chr(97 + at % 26)}{chr(97 + at // 26 % 26)}{chr(97 + at // 676)}{n * 'q'}"
                for n in range(1 + at % 7)
            )
        )
    assert len(tree.found) <= 50 + templates.WORDS
