"""The lm-evaluation-harness over our decoder: its three questions, answered as the plain model would."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from made_decoder import decoder, plainly

from espalier.evaluate import lm_eval_harness
from espalier.evaluate.lm_eval_harness import Answers, HarnessTask, lm
from espalier.language.tokenizer import open_tokenizer
from espalier.recipe.errors import UserError


@pytest.fixture
def answers():
    with torch.no_grad():
        yield Answers(decoder(), open_tokenizer("bytes"))


def test_a_continuation_has_the_likelihood_of_its_tokens(answers) -> None:
    expected, greedy = plainly(answers.model, [0, *b"one two"], list(b" three"))
    scores = answers.continuations([("one two", " three"), ("one", ""), ("", "x")])
    assert scores[0] == (pytest.approx(expected), greedy)
    assert scores[1] == (0.0, True)
    assert scores[2][0] == pytest.approx(plainly(answers.model, [0], list(b"x"))[0])


@pytest.mark.parametrize("length", [1, 23, 24, 25, 48, 61])
def test_rolling_sees_each_token_once_with_as_much_before_it_as_fits(answers, length: int) -> None:
    text = ("The quick brown fox jumps over the lazy dog. " * 3)[:length]
    ids, room = [0, *text.encode()], answers.model.size.context
    expected = 0.0
    for at in range(1, len(ids)):
        stop = min(len(ids), (at - 1) // room * room + room + 1)  # of the chunk that holds this token
        before = ids[max(0, stop - 1 - room) : at]
        logits = answers.model(torch.tensor([before]))[0, -1].log_softmax(-1)
        expected += float(logits[ids[at]])
    assert answers.rolling(["a", text])[1] == pytest.approx(expected)


def test_generation_ends_before_the_stop(answers) -> None:
    (whole,) = answers.until([("The", {"max_gen_toks": 12})])
    assert whole
    assert len(whole) <= 12
    stop = whole[len(whole) // 2]
    asked = [("The", {"until": until, "max_gen_toks": 12}) for until in ([stop], stop, [])]
    assert answers.until(asked) == [*[whole[: whole.index(stop)]] * 2, whole]


def test_requests_that_are_answered_together_have_the_answers_of_each_alone(answers) -> None:
    contexts = ["The", "", "a context that is longer", "x", *(f"number {number}" for number in range(8))]
    asked = [(context, {"max_gen_toks": 5 + number}) for number, context in enumerate(contexts)]
    assert answers.until(asked) == [answers.until([request])[0] for request in asked]


def test_without_the_harness_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(UserError, match="lm-eval"):
        HarnessTask("hellaswag", open_tokenizer("bytes"))


def test_the_harness_takes_our_model_for_one_of_its_own(answers) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM

    model = lm(answers.model, answers.tokenizer)
    assert isinstance(model, LM)
    asked = [("one", " two"), ("three", " four")]
    requests = [Instance("loglikelihood", doc={}, arguments=one, idx=at) for at, one in enumerate(asked)]
    assert model.loglikelihood(requests) == answers.continuations(asked)
    rolling = Instance(request_type="loglikelihood_rolling", doc={}, arguments=("a text",), idx=0)
    assert model.loglikelihood_rolling([rolling]) == answers.rolling(["a text"])
    until = SimpleNamespace(args=("The", {"until": ["."], "max_gen_toks": 5}))
    assert model.generate_until([until]) == answers.until([("The", {"until": ["."], "max_gen_toks": 5})])


def test_a_task_of_the_harness_is_one_of_ours(answers, monkeypatch) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    found = {
        "results": {
            "made": {"alias": "made", "sample_len": 2, "acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": 0.25}
        }
    }
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **asked: found)
    task = HarnessTask("made", answers.tokenizer)
    assert task.evaluate(answers.model, 0) == {"acc": (0.5, 1.0), "acc_norm": (0.25, 1.0)}


TASK = """
task: {name}  # ours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def facts(tmp_path):
    """A folder with a task file and its data."""
    data = tmp_path / "facts.jsonl"
    rows = [{"question": "The", "choices": [" fox", " dog"], "answer": number % 2} for number in range(4)]
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "facts.yaml").write_text(TASK.format(name="our_facts", data=data))
    return tmp_path


def stand_in(monkeypatch, **results):
    """A harness that answers `results`, and says what it was asked."""
    asked = []
    module = ModuleType("lm_eval")
    module.simple_evaluate = lambda **options: asked.append(options) or {"results": results}  # type: ignore[attr-defined]
    tasks = ModuleType("lm_eval.tasks")
    tasks.TaskManager = lambda include_path: ("manager", include_path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", module)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    monkeypatch.setattr(lm_eval_harness, "lm", lambda *_: None)
    return asked


def test_a_task_file_is_a_task_by_the_name_in_it_and_another_one_when_it_or_its_data_changes(facts, monkeypatch):
    asked = stand_in(monkeypatch, our_facts={"acc,none": 0.5})
    words = open_tokenizer("bytes")
    task = HarnessTask(str(facts / "facts.yaml"), words)
    assert (task.name, task.evaluate(None, 0)) == ("our_facts", {"acc": (0.5, 1.0)})
    assert asked[0]["tasks"] == [str(facts / "facts.yaml")]
    contents = {task.content, HarnessTask(str(facts / "facts.yaml"), words).content}
    assert len(contents) == 1
    for name in ("facts.jsonl", "facts.yaml"):
        (facts / name).write_text((facts / name).read_text() + "\n")
        contents.add(HarnessTask(str(facts / "facts.yaml"), words).content)
    assert len(contents) == 3
    (facts / "none.yaml").write_text("dataset_path: json")
    for file, message in (("none.yaml", "names no task"), ("absent.yaml", "absent.yaml")):
        with pytest.raises(UserError, match=message):
            HarnessTask(str(facts / file), words)


def test_tasks_of_a_folder_are_asked_by_name(facts, monkeypatch):
    asked = stand_in(monkeypatch, our_facts={"acc,none": 0.5})
    task = HarnessTask("our_facts", open_tokenizer("bytes"), str(facts))
    assert task.evaluate(None, 0) == {"acc": (0.5, 1.0)}
    assert asked[0]["task_manager"] == ("manager", str(facts))
    with pytest.raises(UserError, match="is no folder"):
        HarnessTask("our_facts", open_tokenizer("bytes"), str(facts / "none"))


def test_the_harness_itself_reads_a_task_file_and_a_folder_of_them(answers, facts, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(facts / "cache"))
    by_file = HarnessTask(str(facts / "facts.yaml"), answers.tokenizer).evaluate(answers.model, 0)
    by_name = HarnessTask("our_facts", answers.tokenizer, str(facts)).evaluate(answers.model, 0)
    assert by_file == by_name == {"acc": (0.5, 1.0)}
