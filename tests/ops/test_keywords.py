"""The fast look at shapes says what the plain one says, of any text and wherever it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.ops.log_scan import keywords

LETTERS = st.text("abcdeortfilxmnsh", max_size=60).map(str.encode)


def which_matter(shapes):
    ends, mattering = keywords.ends_and_matters(b"".join(shape + b"\n" for shape in shapes))
    assert len(ends) == len(shapes)
    return [at in mattering.tolist() for at in range(len(shapes))]


@given(
    st.lists(LETTERS, max_size=30),
    st.integers(0, len(keywords.WORDS) - 1),
    LETTERS,
    LETTERS,
    st.sampled_from([1, 7, 99]),
)
def test_fast_is_plain(shapes, which, before, after, cut):
    shapes = [*shapes, before + keywords.WORDS[which] + after, keywords.WORDS[which][:-1] + after, b""]
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(keywords, "SLICE", cut)
        assert which_matter(shapes) == [keywords.matters(shape) for shape in shapes]


@pytest.mark.parametrize("word", keywords.WORDS)
def test_every_word_is_found_alone_and_at_the_end(word):
    assert which_matter([word, b"qq" + word, word + b"q", b"q"]) == [True, True, True, False]
    assert len(word) <= keywords.WIDE


@pytest.mark.parametrize("word", keywords.WORDS)
def test_a_word_that_lacks_its_end_is_found_only_if_it_holds_another(word):
    assert which_matter([word[:-1], word[:-1] + b"zz"]) == [keywords.matters(word[:-1])] * 2


def test_a_word_does_not_reach_over_two_lines():
    assert which_matter([b"qqtrace", b"backqq", b"fai", b"l"]) == [False, False, False, False]


def test_nothing_is_nothing():
    assert which_matter([]) == []
    assert which_matter([b"", b""]) == [False, False]


def test_a_shape_is_letters_alone():
    assert keywords.shapes(b"[W1] Lost 3 of\n 0x7F \xff\xfe\n") == b"wlostof\nxf\n"
