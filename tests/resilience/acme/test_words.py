"""The fast look at shapes says what the plain one says, of any text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.resilience.acme import words

LETTERS = st.text("abcdeortfilxmnsh", max_size=60).map(str.encode)


@given(st.lists(LETTERS, max_size=30), st.integers(0, len(words.WORDS) - 1), LETTERS, LETTERS)
def test_fast_is_plain(shapes, which, before, after):
    shapes = [*shapes, before + words.WORDS[which] + after, words.WORDS[which][:-1] + after, b""]
    assert words.which_matter(shapes) == [words.matters(shape) for shape in shapes]


@pytest.mark.parametrize("word", words.WORDS)
def test_every_word_is_found_alone_and_at_the_end(word):
    assert words.which_matter([word, b"qq" + word, word + b"q", b"q"]) == [True, True, True, False]


def test_a_word_does_not_reach_over_two_lines():
    assert words.which_matter([b"qqtrace", b"backqq", b"fai", b"l"]) == [False, False, False, False]


def test_nothing_is_nothing():
    assert words.which_matter([]) == []


def test_a_shape_is_letters_alone():
    assert words.shapes(b"[W1] Lost 3 of\n 0x7F \xff\xfe\n") == b"wlostof\nxf\n"
