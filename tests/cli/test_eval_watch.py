"""The options of `espalier eval --watch`: what cannot be is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from espalier.cli import eval as verb
from espalier.cli import eval_watch
from espalier.cli.main import main
from espalier.graph.workload_row import ROW as GRAPH
from espalier.language.tokenizer import open_tokenizer
from espalier.language.workload import LanguageWorkload
from espalier.language.workload_row import ROW as LANGUAGE
from espalier.recipe.errors import UserError


class Language(LanguageWorkload):
    """One that holds nothing out, and has no corpus."""

    def __init__(self) -> None:
        self.tokenizer = open_tokenizer("bytes")

    def validation_samples(self) -> int:
        return 0


@pytest.fixture
def facts(tmp_path: Path) -> str:
    path = tmp_path / "facts.jsonl"
    path.write_text('{"question": "q", "choices": ["a", "b"], "answer": 0}\n')
    return str(path)


def test_tasks_have_names_and_files(facts: str) -> None:
    assert [task.name for task in eval_watch.tasks(Language(), LANGUAGE, [f"one={facts}", f"two={facts}"], "run")] == [
        "one",
        "two",
    ]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["facts.jsonl"], "not NAME=FILE"),
        (["=facts.jsonl"], "not NAME=FILE"),
        (["one={facts}", "one={facts}"], "a task 'one' already"),
        (["one=nowhere.jsonl"], "cannot be read"),
        ([], "no task is given"),
    ],
)
def test_what_is_no_task_is_refused(facts: str, asked: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        eval_watch.tasks(Language(), LANGUAGE, [text.format(facts=facts) for text in asked], "run")


def test_only_language_models_are_asked_questions(facts: str) -> None:
    other = SimpleNamespace(validation_samples=lambda: 0, whole_evaluation=False)
    with pytest.raises(UserError, match="asks a language model"):
        eval_watch.tasks(other, GRAPH, [f"one={facts}"], "run")  # type: ignore[arg-type]


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys) -> None:
    assert main(["eval", str(tmp_path), "--watch"]) == 2
    assert "no run" in capsys.readouterr().err


def test_a_folder_of_tasks_needs_one_that_is_asked() -> None:
    asked = SimpleNamespace(include="tasks", task=["facts=facts.jsonl"])
    with pytest.raises(UserError, match="--include tasks has tasks for lm-eval"):
        verb.run(asked)  # type: ignore[arg-type]
