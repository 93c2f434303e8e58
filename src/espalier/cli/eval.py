"""`espalier eval RUN`: the newest checkpoint on all of the run's held-out data; with tasks, or as checkpoints come."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from espalier.evaluate import low_priority
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import say


def run(arguments: argparse.Namespace) -> int:
    """Prints the held-out figures."""
    if arguments.include is not None and not any(text.startswith("lm-eval:") for text in arguments.task):
        raise UserError(f"--include {arguments.include} has tasks for lm-eval.", do="--task lm-eval:TASK, one of them")
    if arguments.watch or arguments.task or arguments.workers is not None:
        if arguments.data is not None:
            raise UserError(
                f"--data {arguments.data} goes without --watch, --task and --workers.",
                why="those evaluate on the held-out data that the run keeps",
                do=f"espalier eval {arguments.run} --data {arguments.data}",
            )
        arguments.beside = low_priority.is_beside_training(Path(arguments.run), arguments.watch)
        if arguments.beside:
            low_priority.step_back(low_priority.STARTING)  # before torch is imported: that takes seconds of a core
        from espalier.cli import eval_watch

        return eval_watch.run(arguments)
    import torch

    from espalier.cli.infer_over_ranks import load_over_ranks
    from espalier.cli.open_run import DataChoice
    from espalier.parallel.workload import Shard

    trained = load_over_ranks(arguments.run, arguments.trust, DataChoice(evaluates=True, path=arguments.data))
    samples = trained.workload.validation_samples()
    if samples == 0:
        raise UserError(
            f"The run in {arguments.run} has no held-out data for validation.",
            why="the test part is reported beside the validation part, never instead of it",
            do="data.validation = 0.01, or validation nodes in the graph's own split, in a new run",
        )
    with torch.no_grad():
        sums = trained.workload.evaluate(trained.model, Shard(0, samples, micro_batch=16))
    figures = trained.workload.summary(
        {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}
    )
    if arguments.json:
        print(json.dumps({"run": arguments.run, **trained.checkpoint, **figures}))
    else:
        trained.say_skipped()
        lines: dict[str, list[str]] = {"": []}
        for name, value in figures.items():
            column = name.rpartition(".")[2]
            number = f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e6 else f"{value:.4g}"
            lines.setdefault(column if column.isdecimal() else "", []).append(f"{name.replace('_', ' ')} {number}")
        say(f"After step {trained.step}, on {samples} held-out samples: {', '.join(lines.pop(''))}")
        for shown in lines.values():
            say(f"  {', '.join(shown)}")
    return 0
