"""Priors: the newest counts most, a file that is damaged costs nothing but a guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.resilience.acme.evaluate.priors import GUESS, WEIGHT, Prior, Priors


def test_priors_are_an_exponential_average_and_survive_in_a_file(tmp_path: Path) -> None:
    priors = Priors(tmp_path / "priors.json")
    assert priors.of("a").inference == GUESS
    for seconds in (1.0, 2.0):
        priors.learn("a", inference=seconds)
    priors.learn("a", metric=0.5)
    priors.save()
    again = Priors(tmp_path / "priors.json").of("a")
    assert again == Prior(pytest.approx(1.0 + WEIGHT), 0.5, 2)


def test_a_damaged_file_is_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "priors.json").write_text('{"a": {"inference": "quick"}}')
    assert Priors(tmp_path / "priors.json").of("a") == Prior()


def test_a_prior_is_wrong_beyond_a_factor_of_two_either_way() -> None:
    prior = Prior(1.0, 0.0, 1)
    assert [prior.wrong(seconds) for seconds in (0.4, 0.6, 1.9, 2.1)] == [True, False, False, True]
