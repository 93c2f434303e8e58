"""A model that is cut into stages trains as one rank does: losses, norms, weights, validation, checkpoints."""

from __future__ import annotations

import shutil

import msgspec
import pytest
import torch
from tests.mechanisms.pipeline.runs import Cut, corpus, in_flight, recipe_of, together, train
from torch import nn

from espalier.language.workload import open_language
from espalier.mechanisms.pipeline.mechanism import ahead
from espalier.mechanisms.pipeline.schedules import action_lists
from espalier.parallel.model_stages import ModelStages, Placed, check_layers, check_trained, pipelines
from espalier.parallel.workload import Pieces, in_sequence
from espalier.plan import base as plans
from espalier.recipe import recipe_file
from espalier.recipe.errors import Anomaly, UserError
from espalier.train import table, workload_registry
from many_ranks import same

CODECS = ("exact", "split", "int8")
CUTS = {
    "2 stages": Cut((2, 4)),
    "unequal stages, 2 pipelines": Cut((3, 4), dp=2),
    "interleaved zero bubble": Cut((1, 2, 3, 4), interleave=2, schedule="zero_bubble"),
    "gradients in shards, zero bubble": Cut((2, 4), dp=2, shard=(1, 2, 2), schedule="zero_bubble"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def one_rank(folder):
    return train(recipe_of(folder), Cut((4,)).plan())[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CUTS)
def test_a_cut_model_trains_as_one_rank_does(folder, one_rank, name) -> None:
    ranks = train(recipe_of(folder), CUTS[name].plan())
    for rank in ranks:
        assert rank.losses == pytest.approx(one_rank.losses, rel=1e-9)
        assert rank.norms == pytest.approx(one_rank.norms, rel=1e-9)
    assert ranks[0].validation == pytest.approx(one_rank.validation, rel=1e-9)
    same(together(ranks), one_rank.weights, relative=1e-9)
    assert sum(rank.held for rank in ranks) == CUTS[name].dp * one_rank.held  # each parameter on one rank of a pipeline


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "optimizer", "schedule"),
    [
        ({"tied": False}, "muon", "1f1b"),
        (
            {"kind": "moe", "experts": 4, "active": 2, "family": "qwen2", "shared": 24, "normalized": False},
            *("adamw", "zero_bubble"),
        ),
        (
            {"family": "gemma2", "head_size": 8, "window": 5, "attention_cap": 1.0, "logit_cap": 2.0, "tied": True},
            *("adamw", "1f1b"),
        ),
        (
            {"family": "gemma3_text", "head_size": 8, "window": 5, "local_theta": 9.0, "tied": True},
            *("adamw", "1f1b"),
        ),
    ],
)
def test_heads_of_their_own_experts_muon_and_other_families_are_cut_likewise(
    folder, model, optimizer, schedule
) -> None:
    recipe = recipe_of(folder, model, {"optimizer": {"kind": optimizer}})
    whole = train(recipe, Cut((4,)).plan())[0]
    ranks = train(recipe, Cut((1, 4), schedule=schedule).plan())
    assert ranks[1].losses == pytest.approx(whole.losses, rel=1e-9)
    same(together(ranks), whole.weights, relative=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
def test_compiled_blocks_train_as_on_one_rank(folder, one_rank) -> None:
    plan = msgspec.structs.replace(Cut((1, 4)).plan(), compile=True)
    assert train(recipe_of(folder), plan)[0].losses == pytest.approx(one_rank.losses, rel=1e-9)


def test_bf16_trains_as_on_one_rank(folder) -> None:
    recipe = recipe_of(folder, train={"precision": "bf16"})
    whole, cut = (train(recipe, Cut(ends, precision="bf16").plan()) for ends in ((4,), (2, 4)))
    assert cut[0].losses == pytest.approx(whole[0].losses, rel=1e-4)


@pytest.mark.parametrize("first", [(2, 4), pytest.param((4,), marks=pytest.mark.slow)], ids=["cut", "whole"])
def test_a_checkpoint_of_one_cut_is_read_under_another(folder, tmp_path, one_rank, first) -> None:
    recipe = recipe_of(folder)
    begun = train(recipe, Cut(first).plan(), tmp_path, until=2)
    others = Cut((1, 3, 4), schedule="zero_bubble"), Cut((3, 4), dp=2, shard=(1, 1, 2)), Cut((4,))
    for other in others:
        read = train(recipe, other.plan(), tmp_path, until=2)
        same(together(read), together(begun), bitwise=True)
    ended = train(recipe, others[0].plan(), tmp_path)
    assert ended[0].losses == pytest.approx(one_rank.losses[2:], rel=1e-9)
    same(together(ended), one_rank.weights, relative=1e-9)


def stages_of(*stages):
    """A plan of (layers, ranks, tensor ranks, context ranks), whose ranks all have the same samples."""
    made, first, ranks = [], 0, 0
    for last, count, tensor, context in stages:
        cut = {"tensor": tensor, "context": context, "window": context}
        made.append(plans.Stage(ranks=tuple(range(ranks, ranks + count)), layers=(first, last), **cut))
        first, ranks = last, ranks + count
    return msgspec.structs.replace(
        Cut((2, 4)).plan(), ranks=(plans.Rank(share=(0, 8)),) * ranks, stages=tuple(made), algorithm="megatron"
    )


SHARED = {
    "more tensor ranks in the last stage": (stages_of((1, 1, 1, 1), (4, 2, 2, 1)), False),
    "fewer tensor ranks in the last stage": (stages_of((3, 2, 2, 1), (4, 1, 1, 1)), False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("fewer") else pytest.mark.slow) for name in SHARED]
)
def test_stages_whose_ranks_share_matrices_or_sequences_train_as_one_rank_does(folder, one_rank, name) -> None:
    plan, tied = SHARED[name]
    recipe = recipe_of(folder, {"tied": tied})
    whole = one_rank if tied else train(recipe, Cut((4,)).plan())[0]
    found = train(recipe, plan)[0]
    assert found.losses == pytest.approx(whole.losses, rel=1e-9)
    assert found.norms == pytest.approx(whole.norms, rel=1e-9)
    assert found.validation == pytest.approx(whole.validation, rel=1e-9)


def test_a_tied_table_that_two_stages_would_cut_differently_is_refused(folder) -> None:
    with pytest.raises(UserError, match=r"embedding\.weight is used by stage 0 on 1 ranks and by stage 1 on 2"):
        train(recipe_of(folder), SHARED["more tensor ranks in the last stage"][0])


def test_stages_that_share_sequences_unequally_are_refused() -> None:
    with pytest.raises(UserError, match="pipeline 0 share sequences over unequal numbers"):
        pipelines(stages_of((2, 2, 1, 2), (4, 1, 1, 1)))


def test_ranks_of_a_pipeline_send_what_the_formula_says(folder) -> None:
    recipe = recipe_of(folder, {"tied": False}, {"validate_every": 1000})  # once, at the end
    held_out = open_language(recipe).validation_samples()
    ranks = train(recipe, Cut((1, 3, 4)).plan())
    sample = 16 * 32 * 8  # tokens, width, bytes of a value
    forward, backward = (3 * 8 + held_out) * sample, 3 * 8 * sample
    assert [rank.bytes["activations", "send"] for rank in ranks] == [forward, forward + backward, backward]


def test_activations_cross_by_the_codec_of_the_plan(folder, one_rank) -> None:
    exact, lossless, rounded = (
        train(recipe_of(folder), Cut((2, 4), codec=codec, micro_batch=8).plan()) for codec in CODECS
    )
    assert lossless[0].losses == exact[0].losses
    assert rounded[0].losses != exact[0].losses
    assert rounded[0].losses[:2] == pytest.approx(one_rank.losses[:2], rel=2e-3)
    key = "activations", "send"
    assert rounded[0].bytes[key] < 0.3 * exact[0].bytes[key]


def test_every_rank_of_a_pipeline_shows_the_sample_of_one_rank(folder) -> None:
    recipe = recipe_of(folder)
    (whole,), ranks = (train(recipe, Cut(ends).plan(), sample=True, until=1) for ends in ((4,), (1, 3, 4)))
    assert len(whole.texts) == 1
    assert len(whole.texts[0]) > 50
    assert [rank.texts for rank in ranks] == [whole.texts] * 3


def test_a_loss_that_is_not_finite_names_its_rank(folder) -> None:
    opened = open_language(recipe_of(folder))
    plain = opened.loss

    def loss(model, batch):
        value, weight = plain(model, batch)
        return value * torch.nan, weight

    opened.loss = loss
    with pytest.raises(Anomaly, match="The loss is not finite in step 1 on rank 1"):
        train(recipe_of(folder), Cut((2, 4)).plan(), workload=opened)


MODULES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from espalier.module import Parts
from espalier.parallel.workload import Pieces

def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y, reduction="sum"), torch.tensor(float(len(y)))

def data(count):
    x = torch.arange(count * 6.0).view(count, 6).sin()
    return TensorDataset(x, x[:, :2] * x[:, 2:4])

def sequential():
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)
    return Parts(nn.Sequential(*layers), data(32), loss, data(5))

class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.end = nn.Linear(6, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.start(x)
        for one in self.layers:
            x = one(x).tanh()
        return self.end(x)

def pieces(model):
    blocks = [lambda x, given, one=one: one(x).tanh() for one in model.layers]
    modules = [[model.start], *([one] for one in model.layers), [model.end]]
    return Pieces(model.start, blocks, lambda x, given: model.end(x), modules)

def with_pieces():
    torch.manual_seed(0)
    return Parts(Tree(), data(32), loss, data(5), pieces=pieces)

def without():
    return Parts(Tree(), data(32), loss, data(5))
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "cut_modules.py").write_text(MODULES)

    def run(build, ends, schedule="1f1b"):
        table = {"model": {"kind": "module", "build": f"cut_modules:{build}"}}
        table["train"] = {"steps": 3, "batch_tokens": 8, "precision": "fp64", "optimizer": {"kind": "adamw"}}
        settled = workload_registry.settle(recipe_file.from_table(table), folder)
        opened = workload_registry.open_workload(settled)
        return train(settled.recipe, Cut(ends, schedule=schedule).plan(), workload=opened)

    return run


@pytest.mark.extremes
@pytest.mark.parametrize(("build", "ends"), [("sequential", (2, 5)), ("with_pieces", (1, 3))])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_somebodys_own_module_is_cut(modules, build, ends, schedule) -> None:
    (whole,), ranks = modules(build, ends[-1:]), modules(build, ends, schedule)
    assert ranks[1].losses == pytest.approx(whole.losses, rel=1e-12)
    assert ranks[0].validation == pytest.approx(whole.validation, rel=1e-12)
    same(together(ranks), whole.weights)


def test_a_module_that_names_no_pieces_is_refused_with_what_to_say(modules) -> None:
    with pytest.raises(UserError, match="Tree cannot be cut into stages") as refused:
        modules("without", (1, 3))
    assert "return `pieces` from model.build" in refused.value.do


def foretold(seconds, limit):
    """A prediction whose hand-overs take so many seconds in all, of 8 micro-batches of 3 s in 2 stages."""
    return plans.Predicted(
        step_seconds=30.0,
        tokens_per_second=1.0,
        tokens_per_second_per_device=1.0,
        mfu=0.1,
        terms={"forward": 8.0, "backward": 16.0, "send": seconds},
        memory_bytes={"activations": 200.0, "peak": 1000.0},
        memory_limit=limit,
        sent_bytes={},
    )


@pytest.mark.parametrize(
    ("seconds", "limit", "more"),
    [(0.0, 2000.0, [0, 0]), (6.0, 2000.0, [2, 0]), (6.0, 1100.0, [1, 0]), (6.0, 1000.0, [0, 0])],
)
def test_a_plan_with_slow_links_begins_with_more_forward_passes_where_memory_is_free(seconds, limit, more) -> None:
    stages = [msgspec.structs.replace(one, micro_batches=8) for one in Cut((2, 4)).plan().stages]
    plan = msgspec.structs.replace(Cut((2, 4)).plan(), stages=tuple(stages), predicted=foretold(seconds, limit))
    assert ahead(plan, ((0, 2), (2, 4))) == more
    assert ahead(msgspec.structs.replace(plan, predicted=None), ((0, 2), (2, 4))) == []


def test_more_warm_up_changes_no_result(folder, one_rank) -> None:
    plan = Cut((2, 4)).plan()
    stages = tuple(msgspec.structs.replace(one, micro_batches=8) for one in plan.stages)
    slow = msgspec.structs.replace(plan, stages=stages, predicted=foretold(33.0, 2000.0))
    ranks = train(recipe_of(folder), slow)
    assert ranks[0].losses == pytest.approx(one_rank.losses, rel=1e-9)
    same(together(ranks), one_rank.weights, relative=1e-9)


# --- what cannot be cut --------------------------------------------------------------------------------------------


def test_more_stages_than_layers_are_refused_with_the_nearest_number() -> None:
    plan = Cut((1, 2, 3, 4, 5)).plan()
    with pytest.raises(UserError, match="5 stages for 4 layers") as refused:
        check_layers(pipelines(plan), 4)
    assert refused.value.do == "plan.pin.pp=4"


@pytest.mark.parametrize("ends", [(2, 3), (0, 4), (4, 2)])
def test_stages_that_leave_out_layers_are_refused(ends) -> None:
    with pytest.raises(UserError, match="its stages hold layers"):
        check_layers(pipelines(Cut(ends).plan()), 4)


def test_a_plan_whose_ranks_would_wait_without_end_is_refused(folder) -> None:
    plan = Cut((1, 2, 3, 4), interleave=2).plan()
    turned = [msgspec.structs.replace(one, ranks=(rank,)) for one, rank in zip(plan.stages, (0, 1, 1, 0), strict=True)]
    lists = action_lists([one.pipeline for one in pipelines(plan)])
    assert in_flight(lists[0]) < 16
    with pytest.raises(UserError) as refused:
        train(recipe_of(folder), msgspec.structs.replace(plan, stages=tuple(turned)))
    assert "cannot do its action" in refused.value.why


def test_an_unknown_schedule_of_a_plan_is_refused(folder) -> None:
    with pytest.raises(UserError, match="'vshape' is not known"):
        train(recipe_of(folder), Cut((2, 4), schedule="vshape").plan())


def test_zero_bubble_is_refused_with_gathered_parameters_and_compiled_blocks_by_name(folder) -> None:
    recipe = recipe_of(folder)
    gathered = Cut((2, 4), dp=2, shard=(2, 2, 2), schedule="zero_bubble").plan()
    compiled = msgspec.structs.replace(Cut((2, 4), schedule="zero_bubble").plan(), compile=True)
    for plan, other in ((gathered, "amsp"), (compiled, "compile")):
        with pytest.raises(UserError, match=f"zero_bubble and {other} cannot run together|{other} and zero_bubble"):
            table.ordered(recipe, plan)


class TwoTowers(nn.Module):
    """No order of modules is known of it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))


def test_a_parameter_of_no_piece_is_named() -> None:
    model = TwoTowers()
    placed = Placed(pipelines(Cut((1, 2)).plan())[0].pipeline, ((0, 1), (1, 2)))
    with pytest.raises(UserError, match="TwoTowers cannot be cut into stages: scale is in none of its pieces"):
        ModelStages(model, lambda: in_sequence([model.left, model.right]), placed, 0)


def test_a_piece_that_is_frozen_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    check_trained(model, in_sequence(list(model)))
    model[2].requires_grad_(False)
    with pytest.raises(UserError, match=r"(?s)all parameters of its piece 3 are frozen.*try: plan\.pin\.pp=1"):
        check_trained(model, in_sequence(list(model)))


def test_only_the_modules_of_a_rank_stay_and_keep_their_names() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Linear(4, 1))
    placed = Placed(pipelines(Cut((2, 4)).plan())[0].pipeline, ((0, 2), (2, 4)))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    held = ModelStages(model, lambda: in_sequence(list(model)), placed, 1)
    assert held.local_stages == (1,)
    assert set(model.state_dict()) == {"2.weight", "2.bias", "3.weight", "3.bias"}
    same(dict(model.state_dict()), {name: whole[name] for name in model.state_dict()}, bitwise=True)
    x = torch.ones(2, 3)
    assert torch.equal(held.compute(1, x, held.given((x,), {}), (x,), {}), model[3](model[2](x)))


def test_a_shared_parameter_belongs_to_its_first_stage() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.hidden = nn.Embedding(5, 3), nn.Linear(3, 3)

    def pieces(model):
        return lambda: Pieces(
            model.table,
            [lambda x, given: model.hidden(x)] * 2,
            lambda x, given: x @ model.table.weight.t(),
            [[model.table], [], [model.hidden], [model.table]],
        )

    models, stages = [Tied() for _ in range(2)], []
    placed = Placed(pipelines(Cut((1, 2)).plan())[0].pipeline, ((0, 1), (1, 2)))
    for rank, model in enumerate(models):
        stages.append(ModelStages(model, pieces(model), placed, rank))
    assert set(models[0].state_dict()) == {"table.weight"}
    assert set(models[1].state_dict()) == {"hidden.weight", "hidden.bias"}
    assert [(one.owner, one.user) for rank in stages for one in rank.borrowed] == [(0, 1), (0, 1)]
    assert stages[1].borrowed[0].value is models[1].table.weight
