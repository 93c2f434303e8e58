"""Fine-tuning is planned from the name of a shape alone, and trained from weights only."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.cli import resolve_recipe
from espalier.machine import cluster as clusters
from espalier.plan.ask import PlanDecision
from espalier.plan.decide import decide
from espalier.recipe.errors import UserError
from espalier.train import workload_registry

LORA = '[model]\nshape = "llama3-8b"\n[tune]\nkind = "lora"\nfrozen = "{}"\n'
CARD = '[[nodes]]\ndevice = "{}"\ndevices = {}\n'


def resolved(folder: Path, text: str) -> workload_registry.Resolved:
    (folder / "recipe.toml").write_text(text)
    return resolve_recipe.resolve(folder / "recipe.toml", [])


def decided(folder: Path, text: str, device: str, devices: int = 1) -> PlanDecision:
    request = resolve_recipe.request(resolved(folder, text))
    return decide(request, clusters.loads(CARD.format(device, devices)))


@pytest.mark.parametrize(("frozen", "device"), [("bf16", "RTX 4090"), ("int4", "RTX 3090"), ("fp32", "A100-80GB")])
def test_adapters_of_a_shape_have_a_plan_that_holds_the_frozen_weights(
    tmp_path: Path, frozen: str, device: str
) -> None:
    plan = decided(tmp_path, LORA.format(frozen), device).taken
    assert plan.predicted is not None
    memory = plan.predicted.memory_bytes
    bits = {"fp32": 32, "bf16": 16, "int4": 4.25}[frozen]
    tables = 2 * 128256 * 4096
    matrices = 8_030_000_000 - tables
    expected = matrices * bits / 8 + tables * (4 if frozen == "fp32" else 2)
    assert memory["frozen"] == pytest.approx(expected, rel=0.01)
    assert memory["peak"] <= plan.predicted.memory_limit
    assert memory["optimizer"] < memory["frozen"] / 10


def test_adapters_that_do_not_fit_are_offered_with_frozen_weights_in_fewer_bits(tmp_path: Path) -> None:
    decision = decided(tmp_path, LORA.format("fp32"), "RTX 4090")
    assert not decision.fits
    (line,) = [line for line in decision.refusal().do.splitlines() if "tune.frozen" in line]
    assert line.strip().startswith('tune.frozen="bf16"')
    assert decided(tmp_path, LORA.format("bf16"), "RTX 4090").fits


def test_what_is_not_said_is_derived_with_its_reason(tmp_path: Path) -> None:
    planned = resolved(tmp_path, LORA.format("bf16"))
    derived = {derivation.key: derivation for derivation in planned.derivations}
    for option in ("train.sequence", "train.batch_tokens", "train.steps"):
        assert "only planned" in derived[option].reason
    assert planned.recipe.train.batch_tokens == 16 * 2048


def test_a_shape_without_weights_is_not_trained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model to start from"):
        workload_registry.open_workload(resolved(tmp_path, LORA.format("bf16")))


def test_weights_without_conversations_are_not_trained(tmp_path: Path) -> None:
    text = '[model]\nshape = "llama3-8b"\n[tune]\nkind = "full"\n'
    with pytest.raises(UserError, match=r"no \[data\]"):
        workload_registry.open_workload(resolved(tmp_path, text))
