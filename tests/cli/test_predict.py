"""Lines of standard input are answered together, in their order; one without an answer leaves those of others."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from espalier.cli import predict
from espalier.recipe.errors import UserError
from espalier.train.workload_row import Answer, Predicts, Sampling


class Echo(Predicts):
    """Says what was asked together; refuses what begins with `bad`."""

    def answer(self, workload: Any, model: Any, text: str | None, sampling: Sampling) -> Answer:
        (answer,) = self.answers(workload, model, [text], sampling)
        return answer

    def answers(self, workload: Any, model: Any, texts: Sequence[str | None], sampling: Sampling) -> Sequence[Answer]:
        for text in texts:
            if str(text).startswith("bad"):
                raise UserError(f"{text} is bad.", do="better")
        return [Answer(iter([f"{text} of {len(texts)}\n"]), lambda text=text: {"text": text}) for text in texts]


def groups(monkeypatch: pytest.MonkeyPatch, text: bytes, most: int) -> list[list[str]]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    return list(predict._line_groups(most))


def test_lines_that_are_there_are_answered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert groups(monkeypatch, b"a\r\n\nb\nc\xff\nlast", 2) == [["a", "b"], ["c\N{REPLACEMENT CHARACTER}"], ["last"]]
    long = b"x" * 100_000
    assert groups(monkeypatch, long + b"\nb", 8) == [[long.decode()], ["b"]]


def test_a_line_without_an_answer_leaves_those_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(input="-", json=False, tokens=1, temperature=0.0, top_k=None, seed=0)
    trained: Any = SimpleNamespace(workload=None, model=None, checkpoint={})
    assert predict._refused(arguments, trained, Echo(), ["a", "b"]) == 0
    assert predict._refused(arguments, trained, Echo(), ["a", "bad", "b"]) == 1
    arguments.json = True
    assert predict._refused(arguments, trained, Echo(), ["bad"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[:4] == ["a of 2", "b of 2", "a of 1", "b of 1"]
    assert json.loads(shown[4]) == {"error": "bad is bad.", "try": "better", "input": "bad"}
