"""Pipeline schedules: GPipe, 1F1B, interleaved 1F1B and zero bubble, each as action lists.

All of them are one rule with other numbers: some forward passes first, then one forward and one backward pass in turn,
then the remaining backward passes. `torch.distributed.pipelining` has the same orders, which the tests compare with
these; its classes need modules, process groups and equal numbers of stages on every rank, and have one depth for a job.

GPipe: arXiv 1811.06965. 1F1B: PipeDream-Flush, arXiv 2006.09503. Interleaved: Megatron-LM, arXiv 2104.04473. Zero
bubble: ZB-H1, arXiv 2401.10241, whose activations take no more memory than those of 1F1B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from espalier.parallel.action_list import Action, ActionKind, ActionLists, Pipeline, with_transfers
from espalier.recipe.errors import UserError

SCHEDULES = ("1f1b", "zero_bubble", "gpipe")
"""With several stages on a rank, 1F1B and zero bubble are interleaved."""


def action_lists(pipelines: Sequence[Pipeline], schedule: str = "1f1b", ahead: Sequence[int] = ()) -> ActionLists:
    """The lists of all ranks of the pipelines.

    Args:
        schedule: one of `SCHEDULES`.
        ahead: of each place in a pipeline, forward passes to do beyond the usual ones before its first backward pass
            (see `warm_up_for_links`); where a rank holds several stages, none.

    Raises:
        UserError: there is no such schedule.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"schedule = {schedule!r} is not known.", do=f"one of {', '.join(SCHEDULES)}")
    lists: dict[int, list[Action]] = {}
    for pipeline in pipelines:
        places = tuple(dict.fromkeys(pipeline.stages))
        order: dict[int, list[Action]] = {}
        for place, ranks in enumerate(places):
            rule = _rule(pipeline, schedule, place, places)
            alone = len(places) == len(
                pipeline.stages
            )  # in turns of several stages, more of one could wait for another
            extra = ahead[place] if place < len(ahead) and alone else 0
            actions = list(_ordered(rule._replace(warm_up=rule.warm_up + extra), pipeline))
            order |= dict.fromkeys(ranks, actions)
        lists |= with_transfers(pipeline, order)
    return lists


class _Rule(NamedTuple):
    """How one rank orders its passes.

    Attributes:
        stages: that it holds; warm_up: forward passes before the first backward pass.
        rounds: the micro-batches are taken in so many runs, each through all stages of the rank.
        behind: gradients of parameters come so many backward passes after those of inputs; None: with them.
    """

    stages: tuple[int, ...]
    warm_up: int
    rounds: int = 1
    behind: int | None = None


def _rule(pipeline: Pipeline, schedule: str, place: int, places: Sequence[tuple[int, ...]]) -> _Rule:
    """Of the ranks at one of the `places` of a pipeline."""
    stages = tuple(number for number, ranks in enumerate(pipeline.stages) if ranks == places[place])
    several = len(stages) - 1
    count = pipeline.micro_batches
    after = len(places) - 1 - place
    if schedule == "gpipe":
        return _Rule(stages, count * len(stages))
    rounds = max(1, count // len(places)) if several else 1
    first = several * -(-count // rounds)
    if schedule == "zero_bubble":
        return _Rule(stages, first + after, rounds, place)
    return _Rule(stages, first + after * (2 if several else 1), rounds)


def _ordered(rule: _Rule, pipeline: Pipeline) -> Iterator[Action]:
    """The passes of one rank."""
    count = pipeline.micro_batches
    runs = [range(*ends) for ends in pairwise(count * run // rule.rounds for run in range(rule.rounds + 1))]
    forward = [Action(stage, ActionKind.FORWARD, n) for run in runs for stage in rule.stages for n in run]
    backward = [(stage, n) for run in runs for stage in reversed(rule.stages) for n in run]
    first = min(rule.warm_up, len(forward))
    yield from forward[:first]
    for index, (stage, number) in enumerate(backward):
        yield from forward[first + index : first + index + 1]
        yield Action(stage, ActionKind.BACKWARD if rule.behind is None else ActionKind.BACKWARD_INPUT, number)
        if rule.behind is not None and index >= rule.behind:
            yield _weights(*backward[index - rule.behind])
    if rule.behind:
        yield from (_weights(*action) for action in backward[-rule.behind :])


def _weights(stage: int, number: int) -> Action:
    return Action(stage, ActionKind.BACKWARD_WEIGHT, number)


def warm_up_for_links(passes: Sequence[float], links: Sequence[float]) -> list[int]:
    """For `ahead`: how many more forward passes each stage of 1F1B begins with, so that slow links do not leave the
    next stage without work (HAPT, arXiv 2509.24859). A stage needs as many micro-batches on their way as begin until
    the first of them is back.

    Args:
        passes: seconds of forward and backward of one micro-batch in each stage.
        links: seconds of one message between each stage and the next.
    """
    cycle = max(passes)
    warm_up = [0]
    for stage in reversed(range(len(passes))):
        back = sum(passes[stage:]) + 2 * sum(links[stage:])
        more = math.ceil(back / cycle - 1e-9) - (len(passes) - stage)
        warm_up.append(max(warm_up[-1], more))  # a stage that began with fewer than the next would keep it waiting
    return warm_up[:0:-1]
