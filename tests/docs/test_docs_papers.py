"""docs/papers.md says what the cost model says today, and has a headline of every system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import papers  # noqa: E402

PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines()
SYSTEMS = (
    "AMSP",
    "LoongTrain",
    "Buff",
    "FlashFlex",
    "Spindle",
    "CO2",
    "LuWu",
    "Hybrid compression",
    "DiskGNN",
    "Sylvie",
    "TorchGT",
    "FlashMoE",
    "RTop-K",
    "CBM",
    "RCM++",
    "MEGA",
    "A2Q",
    "SpikingNeRF",
    "Acme",
    "The survey",
)
LONG = ("FlashFlex", "DiskGNN", "The survey")
"""Seconds of planning each."""


def marked(number: int) -> object:
    """The number of a headline; slow where its prediction takes seconds."""
    long = papers.HEADLINES[number].system in LONG
    return pytest.param(number, marks=pytest.mark.slow if long else ())


def test_every_system_has_a_headline_in_the_table_and_in_the_words() -> None:
    assert {headline.system for headline in papers.HEADLINES} == set(SYSTEMS)
    for name in SYSTEMS:
        assert any(line.startswith(f"| {name} |") for line in PAGE), name
        assert any(line.startswith(f"- **{name}** (") for line in PAGE), name
    assert len(PAGE) - PAGE.index("## Why they differ") - 2 == len(papers.HEADLINES)


@pytest.mark.parametrize("number", [marked(number) for number in range(len(papers.HEADLINES))])
def test_the_table_says_what_the_cost_model_says(number: int) -> None:
    start = next(at for at, line in enumerate(PAGE) if line.startswith("| system |")) + 2
    assert PAGE[start + number] == papers.row_of(papers.HEADLINES[number]), "make pages"


def test_the_words_are_those_of_the_script() -> None:
    lines = list(papers.words())
    assert PAGE[-len(lines) :] == lines, "make pages"


def test_a_row_that_is_not_measured_is_no_silent_dash() -> None:
    headline = papers.HEADLINES[0]
    wrong = papers.Headline(headline.system, "", "", 1.0, None, ("amsp", "no such case", "ddp"), "")
    with pytest.raises(LookupError, match="no row"):
        _ = wrong.row
