"""Training from a packed set: bitwise training in memory, for any budget, after a kill, and in anybody's loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.graph.conftest import made

from espalier.graph.data import synthetic
from espalier.graph.tasks import answers
from espalier.graph.workload import GraphWorkload
from espalier.mechanisms.disk_batches import PrepareOptions, inference, manifest, prepare
from espalier.mechanisms.disk_batches.mini_batches import RunBatches
from espalier.parallel.workload import PackStart, Shard
from espalier.plan import base as plans
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.train import rank_spec as launch
from espalier.train import trainer, worker
from espalier.train.rank_setup import RankSetup

STEPS = 7


def recipe_of(store=None, graph=None, **train):
    table = {
        "model": {"kind": "sage", "width": 8, "dropout": 0.3},
        "data": {"path": "made"},
        "graph": {"fanout": [3, 2], **(graph or {})},
        "train": {"steps": STEPS, "precision": "fp32", "batch_tokens": 8, **train},
        **({} if store is None else {"store": store}),
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def losses(recipe, graph, micro_batch=None, pack=True, device=0):
    """Losses by step, to the bit, and the workload. `device`: bytes of rows on it."""
    workload = GraphWorkload(recipe, graph)
    samples = workload.global_batch
    plan = plans.Plan(
        ranks=(plans.Rank(share=(0, samples)),), micro_batch=micro_batch or samples, precision=recipe.train.precision
    )
    found = []

    def emit(event, **fields):
        if event == "step":
            found.append(fields["loss"])

    (place,) = launch.places(plan)
    setting = RankSetup(recipe, plan, workload, place, emit=emit)
    if recipe.store is not None and pack:
        workload.pack([setting.shard], PackStart(device=device))
    with worker.joined(place, 90.0) as channel:
        trainer.Trainer(setting, channel).run()
    return found, workload


@pytest.mark.extremes
@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("store", [{"memory": "60KiB"}, {"memory": "1GiB"}, {"memory": "60KiB", "disk": "8KiB"}])
def test_training_from_disk_is_training_in_memory_with_the_same_pool_bitwise(tmp_path, store, micro_batch):
    graph = made()
    store = {"path": str(tmp_path), **store}
    plain, _ = losses(recipe_of(store), graph, micro_batch, pack=False)
    packed, workload = losses(recipe_of(store), graph, micro_batch)
    assert packed == plain
    assert workload.batching.features.stats.batches >= STEPS
    without, _ = losses(recipe_of(), graph, micro_batch)
    assert without[: workload.batching.pool_steps] == packed[: workload.batching.pool_steps]
    assert without != packed  # later epochs draw anew, or in another order


@pytest.mark.parametrize("resample", [0.0, 0.5])
def test_rows_that_the_plan_keeps_on_the_device_are_taken_from_there(tmp_path, resample):
    graph = made()
    recipe = recipe_of({"path": str(tmp_path), "memory": "60KiB", "resample": resample})
    row = 4 * graph.features.shape[1]
    plain, _ = losses(recipe, graph)
    packed, workload = losses(recipe, graph, device=10 * row + 1)
    assert packed == plain
    assert workload.batching.features.stats.device > 0
    assert workload.batching.features._near.rows.shape == (10, row)


def test_batches_come_on_the_accelerator_with_the_rows_there(tmp_path):
    """`meta` stands for one: only shapes are known."""
    graph = made()
    workload = GraphWorkload(recipe_of({"path": str(tmp_path), "memory": "60KiB"}), graph)
    shard = Shard(0, workload.global_batch, workload.global_batch)
    workload.pack([shard], PackStart(device=1 << 30))
    workload.build(torch.device("meta"), torch.float32)
    (batch,) = workload.batches(0, shard)
    features = workload.batching.features
    assert batch.features.device.type == features._near.rows.device.type == "meta"
    assert len(features._near.rows) == features.packed.hot_rows > 0  # not more than there are
    assert features.stats.device > features.stats.host == 0
    workload.batching.close()


def test_a_budget_too_small_for_one_batch_names_the_least_that_does(tmp_path):
    graph = made()
    with pytest.raises(UserError, match=r"store\.memory = .* too small for one batch: it takes at least") as caught:
        losses(recipe_of({"path": str(tmp_path), "memory": 100}), graph)
    least = int(caught.value.what.split()[-2].replace(",", ""))
    losses(recipe_of({"path": str(tmp_path), "memory": least}), graph)
    with pytest.raises(UserError, match="too small"):
        losses(recipe_of({"path": str(tmp_path), "memory": least - 1}), graph)


def test_evaluation_and_answers_from_disk_are_those_in_memory(tmp_path, monkeypatch):
    graph = made()
    _, workload = losses(recipe_of({"path": str(tmp_path), "memory": "40KiB"}), graph)
    model, plain = workload.build(torch.device("cpu"), torch.float32).eval(), GraphWorkload(recipe_of(), graph)
    with torch.no_grad():
        shard = Shard(0, workload.task.validation, 4)
        found, known = workload.evaluate(model, shard), plain.evaluate(model, shard)
        assert found.keys() == known.keys()
        assert all(found[name] == pytest.approx(known[name], rel=1e-6) for name in known)
        named = [one["name"] for one in workload.task.answers(model, [5, 3, 59])]
    assert named == ["node 5", "node 3", "node 59"]
    assert not list(tmp_path.glob("inference-*"))  # few nodes, of their own neighbourhood
    again = GraphWorkload(recipe_of({"path": str(tmp_path), "memory": "40KiB"}), graph)
    monkeypatch.setattr(RunBatches, "_fits", lambda *_: False)
    with torch.no_grad(), monkeypatch.context() as patch:
        first = list(again.task.each(model, range(graph.nodes)))
        (folder,) = tmp_path.glob("inference-*")
        done = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert done.keys() == {"inference.json", "layer-0.rows", "layer-1.rows", "lock"}
        patch.setattr(answers, "AT_ONCE", 7)
        patch.setattr(inference._LayerPass, "write", lambda *_: pytest.fail("all rows are there already"))
        assert list(again.task.each(model, range(graph.nodes))) == first
    assert [one["probability"] for one in first] == pytest.approx(
        [one["probability"] for one in plain.task.answers(model, range(graph.nodes))], rel=1e-5
    )
    folder.joinpath("inference.json").unlink()  # as if it had been killed before its first commit
    with torch.no_grad():
        again.evaluate(model, shard)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == done


def test_a_packed_set_of_other_features_is_refused_by_name_and_one_in_use_too(tmp_path):
    graph, options = made(), PrepareOptions((3, 2), 8, memory="1MiB")
    np.save(tmp_path / "x.npy", np.asarray(graph.features))
    with prepare(graph, tmp_path / "x.npy", tmp_path / "packed", options) as batches:
        for batch in batches:
            assert torch.equal(batch.x, torch.from_numpy(np.asarray(graph.features))[batch.n_id])
            assert torch.equal(batch.y, torch.from_numpy(graph.labels)[batch.n_id[: batch.batch_size]])
    np.save(tmp_path / "x.npy", np.asarray(graph.features) + 1)
    with pytest.raises(UserError, match=r"packed from other inputs: the features \(x\.npy\)"):
        prepare(graph, tmp_path / "x.npy", tmp_path / "packed", options)
    with pytest.raises(UserError, match=r"the fan-outs \(\[3, 2\] then, \[2, 2\] now\)"):
        prepare(graph, None, tmp_path / "packed", replace(options, fanout=(2, 2)))
    with (
        manifest.locked([tmp_path / "other"]),
        pytest.raises(UserError, match=r"Another run is packing into .*other"),
    ):
        prepare(graph, None, tmp_path / "other", options)


def test_a_feature_file_that_is_too_short_is_named(tmp_path):
    synthetic.write(synthetic.parse("planted:nodes=100,features=4"), tmp_path / "graph")
    rows = tmp_path / "graph" / "features.npy"
    np.save(rows, np.load(rows)[:-5])
    with pytest.raises(UserError, match=r"features\.npy has 95 rows for 100 nodes"):
        synthetic.opened(tmp_path / "graph")
    with rows.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(UserError, match=r"features\.npy cannot be read"):
        synthetic.opened(tmp_path / "graph")


def test_a_folder_that_cannot_be_made_is_named():
    with pytest.raises(UserError, match=r"store\.path = '/proc/none.*' cannot be written to"):
        manifest.locked([Path("/proc/none/packed")]).__enter__()


def test_a_share_of_the_pool_is_drawn_anew_for_each_epoch(tmp_path):
    graph, steps = made(), {"steps": 16}
    kept, workload = losses(recipe_of({"path": str(tmp_path), "memory": "1MiB"}, **steps), graph)
    fresh = recipe_of({"path": str(tmp_path), "memory": "1MiB", "resample": 0.5}, **steps)
    first, _ = losses(fresh, graph)
    assert first[: workload.batching.pool_steps] == kept[: workload.batching.pool_steps]
    assert first[workload.batching.pool_steps :] != kept[workload.batching.pool_steps :]
    assert len(first) == 16
    assert losses(fresh, graph)[0] == first  # from what was packed


def test_batches_drawn_anew_have_the_features_of_their_nodes(tmp_path):
    graph = made(nodes=200, edges=800)
    options = PrepareOptions((3, 2), batch=20, memory="1MiB", resample=0.4)
    with prepare(graph, None, tmp_path / "set", options) as batches:
        epochs = [[(one.n_id, one.x.clone()) for one in batches] for _ in range(3)]
    for nodes, x in (one for epoch in epochs for one in epoch):
        assert torch.equal(x, torch.from_numpy(graph.features)[nodes])
    asked = [sorted(tuple(nodes.tolist()) for nodes, _ in epoch) for epoch in epochs]
    assert asked[0] != asked[1] != asked[2]
