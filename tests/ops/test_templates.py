"""Templates: lines that differ in figures are one, other lines are not, and their number is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_scan import masked_plain

from espalier.ops.log_scan import scan
from espalier.ops.log_scan.scan import Templates, masked


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


LINE = st.text("ab1.- /x0f:,é²\x1f\u2003", max_size=60)


@given(LINE)
def test_words_are_masked_one_by_one_as_the_whole_line_would_be(line):
    assert masked(line) == masked_plain(line)


def test_of_a_long_line_only_the_first_words_are_compared():
    line = "word " * 50
    assert masked(line) == masked_plain(line) == ["word"] * scan.COMPARED


def test_there_are_enough_when_one_more_would_tell_nothing(monkeypatch):
    monkeypatch.setattr(scan, "TEMPLATES", 2)
    tree = Templates()
    assert not tree.full
    tree.add("one form of line")
    tree.add("another")
    assert tree.full
