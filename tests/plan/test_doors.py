"""One recipe on one cluster has one plan, whichever door asks; and every plan can be written, read and checked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from asked import decoder, gpus, processor

import espalier
from espalier.cli import main as cli
from espalier.launch import apply_plan
from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.plan import base
from espalier.plan.base import Plan
from espalier.recipe import Adamw, Recipe, recipe_file
from espalier.recipe.errors import UserError
from espalier.train import table, workload_registry


def recipe(draw: random.Random, samples: int = 0, sync: str = "", pin: dict[str, Any] | None = None) -> Recipe:
    """A recipe with some of its choices open and some set; what is given is not drawn."""
    sequence, samples = draw.choice([32, 64, 128]), samples or draw.choice([3, 8, 24, 64])
    heads = draw.choice([2, 4])
    model = {"depth": draw.choice([1, 2, 5]), "width": 64 * heads * draw.choice([1, 2, 8]), "heads": heads}
    kind = draw.choice(["gpt", "gpt", "moe"])
    train = {"steps": 10, "sequence": sequence, "batch_tokens": sequence * samples}
    train |= {"optimizer": {"kind": draw.choice(["adamw", "muon"])}, "precision": draw.choice(["fp32", "fp32", "bf16"])}
    drawn = {
        name: value
        for name, values in {
            "micro_batch": [None, None, None, 1, 2],
            "recompute": [None, None, None, "none", "block"],
            "shard": [
                *[None] * 6,
                {"optimizer": 2},
                {"grads": 2, "optimizer": 2},
                {"params": 1, "grads": 1, "optimizer": 1},
            ],
            "ranks": [*[None] * 6, 2, 4],
        }.items()
        if (value := draw.choice(values)) is not None
    }
    sync = sync or draw.choice(["auto", "auto", "auto", "every_step", "eager"])
    table = {
        "model": {"kind": kind, "vocabulary": 512, **model},
        "train": train,
        "plan": {"pin": drawn, "redundancy": draw.choice([1, 1, 1, 2])} if pin is None else {"pin": pin},
        "comm": {"codec": draw.choice(["auto", "exact", "int8"])},
        "sync": {"kind": sync},
        "checkpoint": {"every": draw.choice(["auto", 7])},
    }
    return recipe_file.from_table(table, "drawn")


def cluster(draw: random.Random) -> Cluster:
    """One machine or several, of processors or GPUs, equal or mixed, near or far."""
    between = draw.choice(["5Mbit/s", "100Mbit/s", "10Gbit/s", "400Gbit/s"])
    count = draw.choice([1, 1, 2, 3, 4])
    if draw.random() < 0.5:
        return processor(draw.choice([1, 2, 4, 6]), draw.choice(["512MiB", "8GiB"]), count, between)
    one = gpus(draw.choice(["A100-80GB", "L4", "H100"]), count, draw.choice([1, 2, 4, 8]), between)
    if draw.random() < 0.3:
        other = gpus("T4", 1, draw.choice([1, 2]), between)
        return msgspec.structs.replace(one, nodes=(*one.nodes, *other.nodes))
    return one


def far(draw: random.Random) -> Cluster:
    """Several machines, each with memory for a model and for what rounds keep of it."""
    count, between = draw.choice([2, 3, 4]), draw.choice(["1Gbit/s", "10Gbit/s"])
    return (
        processor(draw.choice([1, 2]), "64GiB", count, between)
        if draw.random() < 0.5
        else gpus("A100-80GB", count, 1, between)
    )


def near(draw: random.Random) -> Cluster:
    """One machine of several devices."""
    return processor(draw.choice([4, 8]), "64GiB") if draw.random() < 0.5 else gpus("H100", 1, 4)


STRATA = 6


def drawn(seed: int) -> tuple[Recipe, Cluster]:
    """Of six recipes one that agrees by rounds, one with gradients in shards, one whose micro-batch is
    larger than its batch, and three
    of any kind."""
    draw = random.Random(seed)
    if seed % STRATA == 0:
        return recipe(draw, samples=24, sync="eager", pin={}), far(draw)
    if seed % STRATA == 1:
        ranks = draw.choice([2, 4])
        pin = {"ranks": ranks, "shard": {"grads": 2, "optimizer": ranks}}
        return recipe(draw, samples=24, sync="every_step", pin=pin), near(draw)
    if seed % STRATA == 2:
        return recipe(draw, samples=3, pin={"micro_batch": 4}), near(draw)
    return recipe(draw), cluster(draw)


def shown(path: Path, where: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and standard output of `espalier plan`."""
    code = cli.main(["plan", str(path), "--cluster", str(where), "--json"])
    return code, capsys.readouterr().out


def answered(path: Path, where: Path) -> Plan | UserError:
    """What the library says."""
    try:
        return espalier.make_plan(path, where)
    except UserError as error:
        return error


def accepted(plan: Plan) -> bool:
    """Whether `espalier.apply` takes it."""
    try:
        apply_plan.refuse(plan)
    except UserError:
        return False
    return True


def trained(asked: Recipe, plan: Plan) -> bool:
    """Whether its mechanisms can be put round a model by `espalier train`."""
    return table.refusal(workload_registry.settle(asked, None).recipe, plan) is None


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 6), *(pytest.param(first, 30, marks=pytest.mark.slow) for first in range(0, 1230, 30))],
)
def test_recipes_have_one_plan_at_every_door(
    first: int, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = refused = rounds = cut = 0
    for seed in range(first, first + count):
        asked, there = drawn(seed)
        path, where = tmp_path / f"{seed}.toml", tmp_path / f"{seed}.cluster.toml"
        path.write_text(recipe_file.dump(asked))
        where.write_text(clusters.dumps(there))
        code, text = shown(path, where, capsys)
        plan = answered(path, where)
        if isinstance(plan, UserError):
            assert code == plan.exit_code, seed
            refused += 1
            continue
        assert code == 0, seed
        assert base.dumps(plan) == text, seed
        if seed % 4 == 0:
            assert plan == espalier.make_plan(espalier.load(path), there), seed
        written = tmp_path / "plan.json"
        written.write_text(text)
        samples = (asked.train.batch_tokens or 0) // (asked.train.sequence or 1)
        assert base.check(base.read(written), samples) == plan, seed
        plain = plan.recompute == "none" and plan.layout.sp * plan.layout.pp == 1
        assert accepted(plan) == (trained(asked, plan) and plain), seed
        assert trained(asked, plan) == plan.executable, seed
        planned += 1
        rounds += bool(plan.replicas)
        cut += len(plan.units[0].grads) > 1
    each = count // STRATA
    assert planned >= 3 * each
    assert refused >= each
    assert rounds >= each
    assert cut >= each


def cut(tp: int, pp: int, sp: int = 1) -> Plan:
    pins = {"tp": tp, "sp": sp, "pp": pp}
    return espalier.make_plan(decoder(512, 8, batch=24), gpus(count=2), **pins)


@pytest.mark.parametrize(("tp", "pp", "sp"), [(2, 1, 1), (4, 2, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2)])
def test_a_plan_that_cuts_the_model_reads_back(tp: int, pp: int, sp: int) -> None:
    plan = cut(tp, pp, sp)
    assert (plan.layout.tp, plan.layout.pp, plan.layout.sp) == (tp, pp, sp)
    assert base.check(base.loads(base.dumps(plan)), 24) == plan


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_that_compute_one_sample_together_must_have_the_same(tp: int, pp: int) -> None:
    plan = cut(tp, pp)
    last = plan.ranks[-1]
    ranks = (*plan.ranks[:-1], msgspec.structs.replace(last, share=(last.share[0], last.share[1] + 1)))
    with pytest.raises(UserError, match="compute one sample together"):
        base.check(msgspec.structs.replace(plan, ranks=ranks), 25)


@pytest.mark.parametrize(
    ("tp", "pp", "sp", "reason"),
    [(2, 1, 1, ""), (1, 4, 1, "a schedule of stages"), (1, 1, 4, "attention over cut sequences")],
)
def test_train_takes_every_cut_and_apply_what_needs_no_order_of_layers(tp: int, pp: int, sp: int, reason: str) -> None:
    """What apply refuses are a plan's mechanisms, also where a file says that it is executable."""
    plan = msgspec.structs.replace(cut(tp, pp, sp), executable=True, missing="", recompute="none")
    asked = workload_registry.settle(recipe(random.Random(0)), None).recipe
    train = msgspec.structs.replace(asked.train, optimizer=Adamw())
    assert table.ordered(msgspec.structs.replace(asked, train=train), plan)
    if not reason:
        apply_plan.refuse(plan)
        return
    with pytest.raises(UserError, match=f"apply does not allow what .* brings: .*{reason}"):
        apply_plan.refuse(plan)


@pytest.mark.parametrize("changes", [{"recompute": "block"}, {"recompute": "selective"}, {"compile": True}])
def test_apply_refuses_what_changes_the_inside_of_a_model(changes: dict[str, Any]) -> None:
    plain = espalier.make_plan(torch.nn.Linear(8, 8), processor(2), batch=4, ranks=2)
    apply_plan.refuse(plain)
    with pytest.raises(UserError, match=r"recomputes activations|compiles blocks"):
        apply_plan.refuse(msgspec.structs.replace(plain, **changes))


def test_stages_that_forget_a_rank_are_refused() -> None:
    plan = cut(1, 2)
    with pytest.raises(UserError, match="every trainer once"):
        base.check(msgspec.structs.replace(plan, stages=plan.stages[:1]), 24)


def test_sharded_gradients_leave_no_rank_without_a_sample_for_a_micro_batch() -> None:
    shard = {"grads": 2, "optimizer": 2}
    plan = espalier.make_plan(torch.nn.Linear(64, 64), processor(2), batch=11, ranks=2, shard=shard)
    assert plan.rounds is not None
    assert base.check(plan, 11) == plan
    with pytest.raises(UserError, match=r"leaves no layout|No layout satisfies"):
        espalier.make_plan(torch.nn.Linear(64, 64), processor(2), batch=11, ranks=2, shard=shard, micro_batch=1)
