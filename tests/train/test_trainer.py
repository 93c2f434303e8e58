"""The laws of the loop: ranks, micro-batches and interruptions change nothing but rounding."""

import json
import math
import os
import shutil
import signal

import msgspec
import pytest
import torch

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.cli import resolve_recipe
from espalier.kernels import accelerator
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.machine import cluster
from espalier.plan import base as plans
from espalier.plan.layout_estimate import estimate
from espalier.plan.layouts import Layouts
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import Interrupted, RunFailed, UserError
from espalier.train import build, trainer, worker
from espalier.train import rank_spec as launch
from espalier.train.rank_setup import RankSetup
from espalier.train.workload_registry import Resolved

STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        text = "".join(f"def f{i * number}(x):\n    return x * {i} + {number}\n" for i in range(60))
        (folder / f"{number}.py").write_text(text)
    return folder


def recipe_of(corpus, tmp_path, **train):
    table = {
        "model": {"depth": 2, "width": 32, "heads": 2, "feed_forward": 64},
        "data": {"path": str(corpus), "cache": str(tmp_path / "cache"), "validation": 0.2},
        "train": {"steps": STEPS, "sequence": 32, "batch_tokens": 256, "validate_tokens": 512, "precision": "fp32"}
        | train,
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def plan_of(recipe, ranks, micro_batch, **changes):
    samples = recipe.train.batch_tokens // recipe.train.sequence
    cuts = [samples * rank // ranks for rank in range(ranks + 1)]
    shares = tuple(plans.Rank(share=(cuts[rank], cuts[rank + 1])) for rank in range(ranks))
    return plans.Plan(ranks=shares, micro_batch=micro_batch, precision=recipe.train.precision, **changes)


def train(recipe, plan, folder=None, stop_after=None):
    """(losses by step, parameters at the end) of rank 0."""
    workload = open_language(recipe)

    def life(place):
        losses = []

        def emit(event, **fields):
            if event == "step":
                losses.append(fields["loss"])

        setting = RankSetup(recipe, plan, workload, place, folder, emit, stop_after=stop_after)
        saved = None
        with worker.joined(place, 90.0) as channel:
            one = trainer.Trainer(setting, channel)
            if folder is not None:
                saved = Checkpoints(folder / "checkpoints", keep=2, group=worker.saving_group(channel))
                one.restore(saved)
            try:
                one.run(saved)
            except Interrupted:
                assert stop_after is not None
            return losses, {name: value.clone() for name, value in one.built.model.state_dict().items()}

    return agent.run(life, launch.places(plan))[0]


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp64", 1e-9), pytest.param("fp32", 1e-4, marks=pytest.mark.slow)]
)
def test_one_two_and_four_ranks_give_the_same_curve(corpus, tmp_path, precision, tolerance):
    recipe = recipe_of(corpus, tmp_path, precision=precision)
    whole, _ = train(recipe, plan_of(recipe, 1, 8))
    assert len(whole) == STEPS
    assert whole[-1] < whole[0]
    for ranks in (2, 4):
        split, _ = train(recipe, plan_of(recipe, ranks, 2))
        assert split == pytest.approx(whole, rel=tolerance)


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_micro_batches_change_only_rounding(corpus, tmp_path, micro_batch):
    recipe = recipe_of(corpus, tmp_path, precision="fp64")
    whole, _ = train(recipe, plan_of(recipe, 1, 8))
    assert train(recipe, plan_of(recipe, 1, micro_batch))[0] == pytest.approx(whole, rel=1e-10)


def test_unequal_shares_equal_the_whole_batch(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path, precision="fp64")
    whole, _ = train(recipe, plan_of(recipe, 1, 8))
    plan = msgspec.structs.replace(plan_of(recipe, 2, 1), ranks=(plans.Rank(share=(0, 5)), plans.Rank(share=(5, 8))))
    assert train(recipe, plan)[0] == pytest.approx(whole, rel=1e-10)


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [(2, "muon"), (1, "adamw"), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, "muon"), (2, "adamw")))],
)
def test_interrupted_and_resumed_equals_unbroken_bit_for_bit(corpus, tmp_path, ranks, optimizer):
    recipe = recipe_of(corpus, tmp_path, optimizer={"kind": optimizer})
    plan = plan_of(recipe, ranks, 2)
    unbroken, expected = train(recipe, plan)
    first, _ = train(recipe, plan, tmp_path / "run", stop_after=3)
    second, resumed = train(recipe, plan, tmp_path / "run")
    assert first + second == unbroken
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_grown_steps_equal_one_long_run_where_the_schedule_is_constant(corpus, tmp_path):
    options = {"schedule": {"kind": "constant"}}
    long = recipe_of(corpus, tmp_path, **options)
    short = recipe_of(corpus, tmp_path, **options | {"steps": STEPS // 2})
    unbroken, expected = train(long, plan_of(long, 1, 4))
    first, _ = train(short, plan_of(short, 1, 4), tmp_path / "run")
    second, resumed = train(long, plan_of(long, 1, 4), tmp_path / "run")
    assert first + second == unbroken
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_four_ranks_resumed_on_two_meet_the_unbroken_curve(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path, precision="fp64")
    unbroken, _ = train(recipe, plan_of(recipe, 4, 2))
    first, _ = train(recipe, plan_of(recipe, 4, 2), tmp_path / "run", stop_after=3)
    second, _ = train(recipe, plan_of(recipe, 2, 2), tmp_path / "run")
    assert first + second == pytest.approx(unbroken, rel=1e-9)


@pytest.mark.parametrize("mode", ["selective", "block"])
def test_recomputation_changes_no_bit_of_the_curve(corpus, tmp_path, mode):
    recipe = recipe_of(corpus, tmp_path)
    plain, _ = train(recipe, plan_of(recipe, 1, 4))
    assert train(recipe, plan_of(recipe, 1, 4, recompute=mode))[0] == plain


def test_bf16_keeps_fp32_weights_and_follows_the_fp32_curve(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path)
    exact, _ = train(recipe, plan_of(recipe, 1, 4))
    half = recipe_of(corpus, tmp_path, precision="bf16")
    losses, parameters = train(half, plan_of(half, 1, 4))
    assert {value.dtype for value in parameters.values()} == {torch.float32}
    assert losses != exact
    assert losses == pytest.approx(exact, rel=2e-2)


def test_a_recipe_that_leaves_its_precision_open_trains_as_its_plan_says(corpus, tmp_path):
    said, left_open = (recipe_of(corpus, tmp_path, precision=name) for name in ("fp32", "auto"))
    plan = plan_of(said, 1, 4)
    (losses, weights), (others, theirs) = train(said, plan), train(left_open, plan)
    assert others == losses
    assert all(torch.equal(theirs[name], value) for name, value in weights.items())


class Poisoned:
    """A workload whose loss is infinite in one step on one rank's samples."""

    def __init__(self, inner, step, sample):
        self.inner, self.step, self.sample = inner, step, sample

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def batches(self, step, shard):
        found = self.inner.batches(step, shard)
        bad = step == self.step and shard.start <= self.sample < shard.stop
        return [(batch, bad) for batch in found]

    def loss(self, model, batch):
        value, weight = self.inner.loss(model, batch[0])
        return value * (math.inf if batch[1] else 1.0), weight


def test_a_loss_that_is_not_finite_names_step_rank_and_documents(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path)
    plan = plan_of(recipe, 2, 4)
    workload = Poisoned(open_language(recipe), step=2, sample=6)

    def life(place):
        with worker.joined(place, 90.0) as channel:
            trainer.Trainer(RankSetup(recipe, plan, workload, place), channel).run()

    with pytest.raises(RunFailed, match=r"The loss is not finite in step 3 on rank 1") as caught:
        agent.run(life, launch.places(plan))
    assert ".py" in caught.value.why


def test_ledger_equals_the_formula_to_the_byte(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path)
    workload = open_language(recipe)
    plan = plan_of(recipe, 4, 2)
    machine = cluster.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n')
    layout = Layouts(dp=4, micro_batch=2)
    predicted = estimate(resolve_recipe.request(Resolved(recipe)), machine, layout).sent_bytes

    def life(place):
        sent = []

        def emit(event, **fields):
            if event == "step":
                sent.append(fields["bytes"])

        with worker.joined(place, 90.0) as channel:
            one = trainer.Trainer(RankSetup(recipe, plan, workload, place, emit=emit), channel)
            one.run()
        return sent, [p.numel() for p in one.built.model.parameters()]

    for sent, sizes in agent.run(life, launch.places(plan)):
        # A ring all-reduce of every fp32 gradient.
        assert {step["gradients"] for step in sent} == {2 * 3 / 4 * 4 * sum(sizes)}
        # In float64: the step's loss, weight and stop flag, one not-a-number flag per rank, the square of a norm, and
        # counts of who used each parameter, 22 digits to the base 5 in each value.
        assert {step["control"] for step in sent[1:]} == {2 * 3 / 4 * 8 * (3 + 4 + 1 + -(-len(sizes) // 22))}
        assert sent[1] == predicted


@pytest.mark.parametrize(
    ("kind", "shards"),
    [
        ("adamw", [(1, 2, 4)]),
        pytest.param("adamw", [(1, 1, 4), (2, 2, 4), (4, 4, 4)], marks=pytest.mark.slow),
        pytest.param("muon", [(1, 1, 4), (1, 2, 4), (2, 2, 4), (4, 4, 4)], marks=pytest.mark.slow),
    ],
)
def test_the_plans_bytes_of_sharded_states_are_the_ledgers(corpus, tmp_path, kind, shards):
    """To the byte, padding included; whole matrices are dealt to their owners."""
    recipe = recipe_of(corpus, tmp_path, optimizer={"kind": kind})
    open_language(recipe)
    machine = cluster.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n')
    for shard in shards:
        names = dict(zip(("params", "grads", "optimizer"), shard, strict=True))
        groups = {name: tuple(range(size)) if size > 1 else () for name, size in names.items()}
        unit = plans.Unit(**groups, whole=kind == "muon")
        plan = plan_of(recipe, 4, 1, units=(unit,))
        layout = Layouts(dp=4, micro_batch=1, **names)
        predicted = estimate(resolve_recipe.request(Resolved(recipe)), machine, layout).sent_bytes

        def life(place, plan=plan):
            sent = []
            with worker.joined(place, 90.0) as channel:
                for steps in (2, 3):
                    longer = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, steps=steps))
                    trainer.Trainer(RankSetup(longer, plan, open_language(longer), place), channel).run()
                    sent.append(channel.ledger.by_class())
            return sent

        # Three steps less two: parameters may still travel when a step is told.
        for few, both in agent.run(life, launch.places(plan)):
            assert {kind: both[kind] - 2 * few[kind] for kind in predicted} == predicted


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
@pytest.mark.parametrize("shard", [(), (0, 1)])
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler")
def test_compiled_blocks_follow_the_eager_curve(corpus, tmp_path, shard):
    recipe = recipe_of(corpus, tmp_path, steps=3, precision="fp64", optimizer={"kind": "adamw"})
    eager, _ = train(recipe, plan_of(recipe, 1, 8))
    units = (plans.Unit(params=shard, grads=shard, optimizer=shard),)
    compiled, _ = train(recipe, plan_of(recipe, len(shard) or 1, 8, compile=True, units=units))
    assert compiled == pytest.approx(eager, rel=1e-9)


def test_compiling_without_a_compiler_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(accelerator, "available", lambda: False)
    with pytest.raises(UserError, match=r"train\.compile = true needs a C\+\+ compiler"):
        build.compile_blocks([torch.nn.Linear(2, 2)])


def test_a_profile_of_some_steps_is_written(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path)
    table = recipe_file.to_table(recipe) | {"track": {"profile": [2, 3]}}
    train(recipe_file.from_table(table), plan_of(recipe, 1, 8), tmp_path / "run")
    names = {event.get("name") for event in json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]}
    assert {"step 2", "step 3"} <= names
    assert not {"step 1", "step 4"} & names


def test_a_killed_rank_is_named_though_its_peer_only_saw_it_go(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path)
    plan, workload = plan_of(recipe, 2, 4), open_language(recipe)

    def life(place):
        def emit(event, **fields):
            if event == "step" and fields["step"] == 2 and place.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        with worker.joined(place, 90.0) as channel:
            trainer.Trainer(RankSetup(recipe, plan, workload, place, emit=emit), channel).run()

    with pytest.raises(RunFailed, match=r"Rank 1 was killed \(SIGKILL\)"):
        agent.run(life, launch.places(plan))
