"""Packed exports: they have the rows of all nodes, however inference goes, and predict without what the rows tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.graph.conftest import made
from tests.mechanisms.few_bits.test_quantization import recipe, trained

from espalier.graph.data import kept_graph
from espalier.graph.sampling import subgraphs
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.workload import GraphWorkload
from espalier.mechanisms.few_bits import energy, packed_run, quantization
from espalier.recipe.errors import UserError

FEW = 4 * 8 * 100
"""Bytes of messages for 100 edges at once, of some 480."""


@pytest.mark.parametrize("kind", ["gcn", "sage", "gin", "gat"])
def test_a_package_made_in_pieces_is_the_one_made_in_one_piece(tmp_path, monkeypatch, kind):
    workload, model = trained(made(), recipe({"kind": "a2q" if kind == "gcn" else "mega"}, kind), steps=4)
    packed_run.write(workload, model, tmp_path / "whole")
    expected = energy.row_stats(workload, model)
    monkeypatch.setattr(subgraphs, "MOST", FEW)
    plain = infer(model, workload.task.view)
    packed_run.write(workload, model, tmp_path / "pieces")
    for name in (packed_run.PACKED, packed_run.REST):
        assert (tmp_path / "pieces" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with quantization.packing(quantization.equipped(model)):
        assert torch.allclose(infer(model, workload.task.view), plain, atol=1e-6)
    for one, other in zip(energy.row_stats(workload, model), expected, strict=True):
        for found, wanted in zip(one, other, strict=True):
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("quant", [None, {"kind": "mega"}])
def test_the_energy_in_pieces_is_that_in_one_piece(monkeypatch, quant):
    workload, model = trained(made(), recipe(quant, "gin"), steps=2)
    whole = energy.parts(workload, model)
    monkeypatch.setattr(subgraphs, "MOST", FEW)
    assert energy.parts(workload, model) == whole


def opened(folder: Path, options, **more) -> tuple[GraphWorkload, torch.nn.Module]:
    kept = packed_run.with_features(kept_graph.read(folder / "preprocessing"), folder)
    workload = GraphWorkload(options, kept.graph, links=kept.links)
    workload.signs = kept.signs
    model = workload.build(torch.device("cpu"), torch.float32)
    assert packed_run.load(model, folder)
    return workload, model.eval()


@pytest.mark.parametrize("inductive", [False, True])
def test_the_export_has_no_pairs_of_nodes_and_predicts_what_the_run_predicts(tmp_path, inductive):
    options = recipe({"kind": "a2q"}, graph={"inductive": inductive})
    workload, model = trained(made(), options, steps=10)
    packed_run.write(workload, model, tmp_path / "export")
    rest = load_file(tmp_path / "export" / packed_run.REST)
    assert rest
    assert not [name for name, one in rest.items() if "allocator" in name or (len(one.shape) and len(one) == 60)]
    again, found = opened(tmp_path / "export", options)
    assert torch.equal(infer(found, again.task.view), infer(model, workload.task.view))
    packed_run.write(again, found, tmp_path / "twice")
    assert (tmp_path / "twice" / packed_run.PACKED).read_bytes() == (
        tmp_path / "export" / packed_run.PACKED
    ).read_bytes()


@pytest.mark.parametrize("late", ["values", "negative"])
def test_rows_that_come_late_are_packed_too(tmp_path, late):
    graph = made(5000, 6000)
    rows = np.eye(5, dtype=np.float32)[np.arange(5000) % 5] if late == "values" else np.abs(graph.features)
    features = np.concatenate([rows[:4500], graph.features[4500:]])
    options = recipe({"kind": "a2q", "bits": 5, "target": "100KB"})
    workload, model = trained(replace(graph, features=features), options, steps=1)
    packed_run.write(workload, model, tmp_path / "export")
    again, _ = opened(tmp_path / "export", options)
    errors = np.abs(again.graph.features - features)[4500:].mean(1) / np.abs(features)[4500:].mean(1)
    assert np.median(errors) < 0.2
    assert again.graph.features[4500:].min() < 0


def test_features_that_one_bit_a_value_does_not_reproduce_are_refused():
    with pytest.raises(UserError, match="as one bit a value"):
        packed_run.packed_input(np.float32([[0, 2], [2, 1]]))
    packed, scale = packed_run.packed_input(np.float32([[0, 2], [0, 0], [3, 3]]))
    assert (packed.decoded().codes * scale[:, None]).tolist() == [[0, 2], [0, 0], [3, 3]]
