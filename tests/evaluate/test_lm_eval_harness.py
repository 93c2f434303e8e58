"""The lm-evaluation-harness over our decoder: its three questions, answered as the plain model would."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from made_decoder import decoder, plainly

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
