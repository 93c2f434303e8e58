"""Lists written by hand: unequal stages, pipelines of different depth and width, run as one rank does."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from torch import nn

from espalier.comm import plain_collectives
from espalier.mechanisms.pipeline.pipeline import PipelinePasses, PipelineSchedule
from espalier.mechanisms.pipeline.split_backward import WeightGradients
from espalier.parallel.action_list import Pipeline, check, loads
from espalier.parallel.model_stages import ModelStages, Placed
from espalier.parallel.stage_messages import StageMessages
from espalier.parallel.workload import in_sequence
from espalier.recipe.errors import PeerLost, UserError
from many_ranks import forks, ranks, same

DEEP = Placed(Pipeline(((0,), (1, 2), (3,)), 3), ((0, 1), (1, 4), (4, 6)))
FLAT = Placed(Pipeline(((4,), (5,)), 2), ((0, 5), (5, 6)))
BY_HAND = """
0: 0F0,0SEND_F0@1,0SEND_F0@2,0F1,0SEND_F1@1,0SEND_F1@2,0RECV_B0@1,0B0,0F2,0SEND_F2@1,0SEND_F2@2,0RECV_B1@1,\
0B1,0RECV_B2@1,0B2
1: 1RECV_F0@0,1F0,1SEND_F0@3,1RECV_B0@3,1I0,1SEND_B0@0,1RECV_F1@0,1F1,1SEND_F1@3,1W0,1RECV_B1@3,1B1,\
1SEND_B1@0,1RECV_F2@0,1F2,1SEND_F2@3,1RECV_B2@3,1B2,1SEND_B2@0
2: 1RECV_F0@0,1F0,1RECV_B0@3,1B0,1RECV_F1@0,1F1,1RECV_B1@3,1B1,1RECV_F2@0,1F2,1RECV_B2@3,1I2,1W2
3: 2RECV_F0@1,2F0,2B0,2SEND_B0@1,2SEND_B0@2,2RECV_F1@1,2F1,2B1,2SEND_B1@1,2SEND_B1@2,2RECV_F2@1,2F2,2B2,\
2SEND_B2@1,2SEND_B2@2
4: 0F0,0SEND_F0@5,0F1,0SEND_F1@5,0RECV_B0@5,0B0,0RECV_B1@5,0B1
5: 1RECV_F0@4,1F0,1RECV_F1@4,1F1,1B0,1SEND_B0@4,1B1,1SEND_B1@4
"""
LISTS = loads(BY_HAND)
BATCHES = [torch.arange(15.0, dtype=torch.float64).view(5, 3).sin()[n : n + 1] for n in range(5)]


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 2)]
    return nn.Sequential(*layers).double()


def loss(model, batch):
    return model(batch).square().sum(), torch.tensor(float(len(batch)))


def schedule_of(model, placed, rank, group, lists=LISTS):
    stages = ModelStages(model, lambda: in_sequence(list(model)), placed, rank)
    passes = PipelinePasses(5.0, lambda last: nullcontext(), nullcontext, nullcontext, WeightGradients(model))
    messages = StageMessages(group, {one: one for one in range(6)}, torch.device("cpu"))
    return PipelineSchedule(rank, stages, messages, lambda pipeline: lists, passes)


def gradients(group):
    model, rank = model_of(), group.rank()
    placed, batches = (DEEP, BATCHES[:3]) if rank < 4 else (FLAT, BATCHES[3:])
    outcome = schedule_of(model, placed, rank, group).run(model, batches, loss)
    own = {name: one.grad for name, one in model.named_parameters()}
    shown = plain_collectives.all_gather([float(outcome.loss), float(outcome.weight)], group)
    return own, shown


def test_pipelines_of_different_depth_and_width_give_the_gradients_of_one_rank() -> None:
    check([DEEP.pipeline, FLAT.pipeline], LISTS)
    whole = model_of()
    value = sum(loss(whole, batch)[0] for batch in BATCHES)
    (value / 5).backward()
    found = forks(6, gradients)
    assert sum(one for one, _ in found[0][1]) == pytest.approx(value.item(), rel=1e-12)
    assert sum(weight for _, weight in found[0][1]) == 5
    same(found[1][0], found[2][0])  # both ranks of a stage compute the same
    total: dict[str, torch.Tensor] = {}
    for rank in (0, 1, 3, 4, 5):
        for name, gradient in found[rank][0].items():
            total[name] = total.get(name, 0) + gradient
    same(total, {name: one.grad for name, one in whole.named_parameters()}, relative=1e-12)


def test_lists_that_would_wait_without_end_are_refused_before_a_message_is_sent() -> None:
    lists = {rank: list(actions) for rank, actions in LISTS.items()}
    lists[3] = [one for one in lists[3] if str(one) != "2SEND_B1@1"]

    def refused(group):
        model = model_of()
        placed = DEEP if group.rank() < 4 else FLAT
        try:
            schedule_of(model, placed, group.rank(), group, lists).actions(3 if group.rank() < 4 else 2)
        except UserError as error:
            return error.why, sum(group.ledger.calls.values())
        return "", 0

    why = "rank 1 cannot do its action 11, 1RECV_B1@3: it waits without end, as rank 3 never sends that"
    assert ranks(6, refused) == [(why, 0)] * 4 + [("", 0)] * 2


@pytest.mark.parametrize("calls", [0, 2])
def test_a_loss_that_does_not_call_the_model_once_is_refused(calls) -> None:
    def wrong(model, batch):
        value = sum((model(batch).sum() for _ in range(calls)), torch.zeros((), requires_grad=True))
        return value, torch.tensor(1.0)

    model = model_of()
    alone = Placed(Pipeline(((0,), (0,)), 1), ((0, 3), (3, 6)))
    made = schedule_of(model, alone, 0, None, loads("0: 0F0,1F0,1B0,0B0"))
    with pytest.raises(UserError, match="does not call the model" if not calls else "calls the model more than once"):
        made.run(model, BATCHES[:1], wrong)


def test_neighbouring_stages_on_one_rank_need_no_message() -> None:
    model, whole = model_of(), model_of()
    alone = Placed(Pipeline(((0,), (0,)), 2), ((0, 3), (3, 6)))
    made = schedule_of(model, alone, 0, None, loads("0: 0F0,1F0,0F1,1I0,0I0,1F1,1B1,0W0,0B1,1W0"))
    made.run(model, BATCHES[:2], loss)
    (sum(loss(whole, batch)[0] for batch in BATCHES[:2]) / 5).backward()
    same(
        {name: one.grad for name, one in model.named_parameters()},
        {name: one.grad for name, one in whole.named_parameters()},
    )


def test_a_rank_that_is_gone_is_named_within_the_deadline() -> None:
    def half(group):
        if group.rank() == 1:
            return "gone"
        group.set_timeout(timedelta(seconds=1))
        model = model_of()
        placed = Placed(Pipeline(((0,), (1,)), 1), ((0, 3), (3, 6)))
        lists = loads("0: 0F0,0SEND_F0@1,0RECV_B0@1,0B0\n1: 1RECV_F0@0,1F0,1B0,1SEND_B0@0")
        try:
            schedule_of(model, placed, 0, group, lists).run(model, BATCHES[:1], loss)
        except PeerLost as error:
            return str(error)
        return "ran"

    assert "rank 1" in forks(2, half)[0].lower()
