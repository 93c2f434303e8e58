"""Errors for people: the message says what, why and what to try, survives a process boundary, and has its exit code."""

from __future__ import annotations

import pickle

import pytest

from espalier.recipe import errors
from espalier.recipe.errors import EspalierError, Interrupted, RunFailed, UserError


def every_kind(kind: type[EspalierError] = EspalierError) -> list[type[EspalierError]]:
    return [kind, *(found for below in kind.__subclasses__() for found in every_kind(below))]


def test_the_message_says_what_why_and_what_to_try() -> None:
    error = UserError("train.steps is 0.", why="a run has a step at least", do="train.steps=50")
    assert str(error) == "train.steps is 0.\n  why: a run has a step at least\n  try: train.steps=50"
    assert str(UserError("No recipe.")) == "No recipe."


@pytest.mark.parametrize("kind", every_kind())
def test_an_error_survives_the_way_from_rank_to_parent(kind: type[EspalierError]) -> None:
    error = kind("a", why="b", do="c")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (back.what, back.why, back.do, str(back)) == ("a", "b", "c", str(error))


def test_exit_codes() -> None:
    assert (UserError.exit_code, RunFailed.exit_code, Interrupted.exit_code) == (2, 1, 130)
    assert all(kind.exit_code in (1, 2, 130) for kind in every_kind())


def test_the_nearest_word_is_the_misspelt_one_and_nothing_for_nonsense() -> None:
    assert errors.nearest("widht", ["depth", "width", "heads"]) == "width"
    assert errors.nearest("qqqq", ["depth", "width"]) is None
    assert errors.nearest("x", []) is None


@pytest.mark.parametrize(
    ("word", "known"),
    [
        ("fp8", ["fp64", "fp32", "fp16"]),
        ("cp", ["tp", "pp", "sp", "dp"]),
        ("A6000", ["A800", "A100"]),
        ("llama-70b", ["llama-7b"]),
        ("adafactor", ["adamw", "muon"]),
        ("gpt2", ["gpt"]),
    ],
)
def test_another_thing_is_not_advised_for_being_spelled_alike(word: str, known: list[str]) -> None:
    assert errors.nearest(word, known) is None


def test_a_missing_extra_names_the_library_and_the_command() -> None:
    error = errors.missing_extra("datasets", "hub", "hf: data")
    assert "'datasets'" in error.what
    assert error.do == "pip install 'espalier-train[hub]'"
