"""EleutherAI's lm-evaluation-harness over our decoder: its LM class, and one of its tasks as one of ours.

The harness (https://github.com/EleutherAI/lm-evaluation-harness, `pip install 'espalier-train[lm-eval]'`) is imported
when it is used. Its base class asks for three methods; requests are its `Instance`s, whose `args` are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.evaluate.multiple_choice import loglikelihoods, tokens_of
from espalier.language import generate, gpt
from espalier.language.tokenizer import Tokenizer
from espalier.parallel.workload import Sums
from espalier.recipe import data_hash
from espalier.recipe.cache_dir import hashed
from espalier.recipe.errors import UserError, missing_extra
from espalier.recipe.foreign_files import printable, read_text
from espalier.train.workload_row import Sampling

TOKENS = 256
"""Tokens generated where a task sets no `max_gen_toks`, as the harness's own models do."""


class Answers:
    """The three questions of the harness, answered by our model. Knows nothing of the harness."""

    def __init__(self, model: gpt.GPT, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): log-likelihood (nats) of the continuation, and whether greedy decoding would
        give it."""
        ids = [(self._prompt(context), tokens_of(continuation, self.tokenizer)) for context, continuation in pairs]
        scores = iter(loglikelihoods(self.model, [pair for pair in ids if pair[1]]))
        return [next(scores) if tail else (0.0, True) for _, tail in ids]

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-likelihood (nats) of all of each text, each token seen once, with as much before it as fits."""
        room = self.model.size.context
        pairs, of_text = [], []
        for number, ids in enumerate(map(self._prompt, texts)):
            for start in range(1, len(ids), room):
                stop = min(len(ids), start + room)
                pairs.append((ids[max(0, stop - room - 1) : start], ids[start:stop]))
                of_text.append(number)
        totals = [0.0] * len(texts)
        for number, (total, _) in zip(of_text, loglikelihoods(self.model, pairs), strict=True):
            totals[number] += total
        return totals

    def until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """What the model writes after each context, up to the first of its `options["until"]`."""
        prompts = [self._prompt(context) for context, _ in requests]
        samplings = [_sampling(options) for _, options in requests]
        endings = [[token] for token in (self.tokenizer.boundary, *self.tokenizer.document_end)]
        texts = [""] * len(requests)
        for numbers in generate.groups([len(prompt) for prompt in prompts]):
            together = [prompts[number] for number in numbers], [samplings[number] for number in numbers]
            decoding = generate.Decoding(self.model, *together)
            for piece in generate.write(decoding, self.tokenizer, endings):
                texts[numbers[piece.row]] += piece.text
        return texts

    def _prompt(self, text: str) -> list[int]:
        return [self.tokenizer.boundary, *tokens_of(text, self.tokenizer)]


def _sampling(options: Mapping[str, Any]) -> Sampling:
    stops = options.get("until") or []
    return Sampling(
        tokens=int(options.get("max_gen_toks", TOKENS)),
        temperature=float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0,
        top_k=options.get("top_k"),
        top_p=options.get("top_p"),
        stop=tuple(stop for stop in ([stops] if isinstance(stops, str) else stops) if stop),
    )


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
            return answers.continuations([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return answers.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return answers.until([request.args for request in requests])

    return Espalier()


class HarnessTask:
    """A task of the harness, as one record: the harness brings its own data, prompts and metrics.

    Args:
        task: its name, or a YAML file that says what it is.
        include: a folder of further tasks, as YAML files.

    Raises UserError when lm-eval is not installed, and for a file or folder that is none.
    """

    def __init__(self, task: str, tokenizer: Tokenizer, include: str | None = None) -> None:
        self.records = 1
        self._tokenizer = tokenizer
        try:
            import lm_eval
        except ImportError:
            raise missing_extra("lm_eval", "lm-eval", f"--task lm-eval:{task}") from None
        if include is not None and not Path(include).is_dir():
            raise UserError(f"--include {include} is no folder.", do="a folder with the YAML files of tasks")
        self.name = self._task = task
        self._include = include
        hashes = {} if include is None else data_hash.below(Path(include))
        if task.endswith((".yaml", ".yml")):
            text = read_text(Path(task), "--task lm-eval:FILE.yaml, a task of the harness")
            named = re.search(r"^(?:task|group): *['\"]?([\w.-]+)", text, re.MULTILINE)
            if named is None:
                raise UserError(f"{printable(task)} names no task.", do="task: NAME in it")
            self.name = named[1]
            words = [task, *re.split(r"[\s'\",\[\]{}]+", text)]  # among them the files of its data
            hashes |= data_hash.hashes({word: word for word in words if os.path.isfile(word)})
        self.content = hashed([getattr(lm_eval, "__version__", ""), hashes])

    def evaluate(self, model: gpt.GPT, record: int) -> Sums:
        """The harness's own results for its task."""
        import lm_eval
        from lm_eval.tasks import TaskManager

        answer = lm_eval.simple_evaluate(
            model=lm(model, self._tokenizer),
            tasks=[self._task],
            task_manager=TaskManager(include_path=self._include) if self._include else None,
            bootstrap_iters=0,
        )
        return {
            metric.removesuffix(",none"): (float(value), 1.0)
            for metric, value in answer["results"][self.name].items()
            if isinstance(value, int | float) and "," in metric and "stderr" not in metric  # "METRIC,FILTER"
        }

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return dict(means)
