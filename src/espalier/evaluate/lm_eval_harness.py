"""EleutherAI's lm-evaluation-harness over our decoder: its LM class, and one of its tasks as one of ours.

The harness (https://github.com/EleutherAI/lm-evaluation-harness, `pip install 'espalier-train[lm-eval]'`) is imported
when it is used. Its base class asks for three methods; requests are its `Instance`s, whose `args` are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from espalier.evaluate.multiple_choice import loglikelihoods
from espalier.language import generate, gpt
from espalier.language.tokenizer import Tokenizer
from espalier.parallel.workload import Sums
from espalier.recipe.errors import missing_extra

TOKENS = 256
"""Tokens generated where a task sets no `max_gen_toks`, as the harness's own models do."""


class Answers:
    """The three questions of the harness, answered by our model. Knows nothing of the harness."""

    def __init__(self, model: gpt.GPT, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def continuation(self, context: str, continuation: str) -> tuple[float, bool]:
        """Log-likelihood (nats) of `continuation` after `context`, and whether greedy decoding would give it."""
        tail = self._ids(continuation)
        if not tail:
            return 0.0, True
        return loglikelihoods(self.model, [([self.tokenizer.boundary, *self._ids(context)], tail)])[0]

    def rolling(self, text: str) -> float:
        """Log-likelihood (nats) of all of `text`, each token seen once, with as much before it as fits."""
        ids = [self.tokenizer.boundary, *self._ids(text)]
        room = self.model.size.context
        total = 0.0
        for start in range(1, len(ids), room):
            stop = min(len(ids), start + room)
            head = ids[max(0, stop - room - 1) : start]
            total += loglikelihoods(self.model, [(head, ids[start:stop])])[0][0]
        return total

    def until(self, context: str, options: Mapping[str, Any]) -> str:
        """What the model writes after `context`, up to the first of `options["until"]`."""
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
        fresh = generate.generate(
            self.model,
            [self.tokenizer.boundary, *self._ids(context)],
            tokens=int(options.get("max_gen_toks", TOKENS)),
            temperature=temperature,
            seed=0,
            stop=(self.tokenizer.boundary, *self.tokenizer.document_end),
        )
        made = []

        def going_on(token: int) -> bool:
            made.append(token)
            return not any(stop in self.tokenizer.decode(made) for stop in stops)

        for _ in takewhile(going_on, fresh):
            pass
        text = self.tokenizer.decode(made)
        ends = [text.index(stop) for stop in stops if stop in text]
        return text[: min(ends)] if ends else text

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text.encode())]


def lm(model: gpt.GPT, tokenizer: Tokenizer) -> Any:
    """An `lm_eval.api.model.LM` over `model`, for `lm_eval.simple_evaluate(model=…)`.

    Raises UserError when lm-eval is not installed.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise missing_extra("lm_eval", "lm-eval", "A task of the lm-evaluation-harness") from None
    answers = Answers(model, tokenizer)

    class Espalier(LM):
        """The harness's face of the model."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return [answers.continuation(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return [answers.rolling(*request.args) for request in requests]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return [answers.until(*request.args) for request in requests]

    return Espalier()


class HarnessTask:
    """One task of the harness, as one record: the harness brings its own data, prompts and metrics."""

    def __init__(self, task: str, tokenizer: Tokenizer) -> None:
        self.name = task
        self.records = 1
        self._tokenizer = tokenizer
        try:
            import lm_eval
        except ImportError:
            raise missing_extra("lm_eval", "lm-eval", f"--task lm-eval:{task}") from None
        self.content = f"lm-eval-{getattr(lm_eval, '__version__', '')}"

    def evaluate(self, model: gpt.GPT, record: int) -> Sums:
        """The harness's own results for its task."""
        import lm_eval

        answer = lm_eval.simple_evaluate(model=lm(model, self._tokenizer), tasks=[self.name], bootstrap_iters=0)
        return {
            metric.removesuffix(",none"): (float(value), 1.0)
            for metric, value in answer["results"][self.name].items()
            if isinstance(value, int | float) and "," in metric and "stderr" not in metric  # "METRIC,FILTER"
        }

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return dict(means)
