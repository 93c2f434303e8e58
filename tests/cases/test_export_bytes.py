"""Every exporter writes the same bytes whenever it is asked."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.graph.conftest import made
from tests.mechanisms.few_bits.test_quantization import recipe, trained
from weight_folders import TEMPLATES, base_of, quietly, workload_of

from espalier import recipe as config
from espalier.language.tokenizer import open_tokenizer
from espalier.recipe import model_kinds
from espalier.train import workload_registry
from espalier.train.workload_row import Exports

__all__ = ["quietly"]

ROWS = [workload_registry.row_of(kind) for kind in model_kinds.KINDS]
EXPORTERS = {form: export for row in ROWS if isinstance(row, Exports) for form, export in row.exports.items()}
OF_GRAPHS = ("embeddings", "packed")
Made = tuple[Any, torch.nn.Module]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Made]:
    """A workload and its model of graphs (True) and of language, with adapters."""
    base = base_of(tmp_path_factory.mktemp("base") / "base", "begun with bos", TEMPLATES["llama3"])
    workload = workload_of(base, open_tokenizer(str(base)), None, config.Lora(rank=2))
    language = workload, workload.build(torch.device("cpu"), torch.float32)
    return {False: language, True: trained(made(), recipe({"kind": "a2q"}), steps=2)}


@pytest.mark.parametrize("form", EXPORTERS)
def test_exports_are_the_same_bytes_whenever_they_are_written(
    form: str, models: dict[bool, Made], tmp_path: Path
) -> None:
    for number in "123":
        EXPORTERS[form](*models[form in OF_GRAPHS], tmp_path / number)
    names = [str(file.relative_to(tmp_path / "1")) for file in (tmp_path / "1").rglob("*") if file.is_file()]
    assert len(names) > 1
    for number in "23":
        assert filecmp.cmpfiles(tmp_path / "1", tmp_path / number, names, shallow=False)[0] == names
