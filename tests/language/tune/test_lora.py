"""Adapters begin at the model's own answers, merge into plain matrices, and are all that is trained and saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F

from espalier import recipe as config
from espalier.language import gpt, hf
from espalier.language.tune import lora
from espalier.language.tune.workload import TuneWorkload, plain
from espalier.machine import cluster as clusters
from espalier.plan.decide import decide
from espalier.train.request_from_recipe import of_recipe

TOKENS = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(3))
KINDS = [
    config.Lora(rank=4),
    config.Lora(rank=3, alpha=5.0, rslora=True, targets=("query", "down")),
    config.Lora(rank=4, dora=True),
    config.Lora(rank=4, frozen="int8"),
    config.Lora(rank=4, frozen="int4"),
    config.Lora(rank=4, frozen="bf16", targets=("query", "value")),
]


def model_of(workload: TuneWorkload, dtype: torch.dtype = torch.float32) -> gpt.GPT:
    model = workload.build(torch.device("cpu"), dtype)
    assert isinstance(model, gpt.GPT)
    return model


def stirred(model: gpt.GPT) -> gpt.GPT:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


@pytest.mark.parametrize("tune", KINDS)
def test_training_begins_at_the_frozen_model_and_merging_changes_nothing(
    opened: Callable[..., TuneWorkload], tune: config.Lora
) -> None:
    workload = opened(tune)
    model = model_of(workload)
    with torch.no_grad(), lora.without_adapters(model):
        before = model(TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), before, rtol=0, atol=1e-6 if tune.dora else 0)
        adapted = stirred(model)(TOKENS)
        assert (adapted - before).abs().max() > 1e-3
        torch.testing.assert_close(plain(model)(TOKENS), adapted, rtol=1e-4, atol=1e-5)


def test_storing_frozen_weights_in_bf16_changes_no_bit_where_products_are_in_bf16(
    opened: Callable[..., TuneWorkload],
) -> None:
    """Weights that bf16 can hold: the others are rounded once instead of at every product."""
    losses, gradients = [], []
    workload = opened(config.Lora(rank=4))
    rounded = {name: value.bfloat16().float() for name, value in model_of(workload).named_parameters()}
    for frozen in ("fp32", "bf16"):
        model = super(TuneWorkload, workload).build(torch.device("cpu"), torch.float32)
        model.load_state_dict({name: rounded[name] for name, _ in model.named_parameters()})
        model = stirred(lora.adapt(model, config.Lora(rank=4, frozen=frozen), seed=0))  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss_sum(TOKENS[:, :-1], TOKENS[:, 1:])
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert torch.equal(*losses)
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


@pytest.mark.parametrize("tune", KINDS)
def test_only_adapters_have_gradients_and_are_in_the_state(
    opened: Callable[..., TuneWorkload], tune: config.Lora
) -> None:
    model = model_of(opened(tune))
    model(TOKENS).square().sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    parts = {"lora_a", "lora_b", *(["magnitude"] if tune.dora else [])}
    targets = tune.targets or lora.TARGETS
    assert {name.rpartition(".")[2] for name in trained} == parts
    assert len(trained) == 2 * len(targets) * len(parts)
    assert set(model.state_dict()) == trained
    other = model_of(opened(tune))
    other.load_state_dict(stirred(model).state_dict())
    with torch.no_grad():
        assert torch.equal(other(TOKENS), model(TOKENS))


@pytest.mark.parametrize("dora", [False, True])
def test_gradients_are_those_of_finite_differences(dora: bool) -> None:
    inner = torch.nn.Linear(5, 4, bias=False).double()
    layer = lora.LoraLinear(inner, config.Lora(rank=2, dora=dora)).double()
    layer.begin(1)
    with torch.no_grad():
        layer.lora_b.normal_(generator=torch.Generator().manual_seed(2))
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    if not dora:  # DoRA's lengths are constants in backward
        names = ("lora_a", "lora_b")
        values = [getattr(layer, name).detach().clone().requires_grad_() for name in names]

        def answer(x: torch.Tensor, *each: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(layer, dict(zip(names, each, strict=True)), (x,))  # type: ignore[no-any-return]

        assert torch.autograd.gradcheck(answer, (x, *values))
        return
    layer(x).sum().backward()
    assert layer.magnitude is not None
    direction = layer.merged_directions()
    expected = (F.linear(x, direction) / direction.norm(dim=1)).sum(0)
    torch.testing.assert_close(layer.magnitude.grad, expected, rtol=1e-10, atol=1e-12)


def test_at_full_rank_the_first_step_is_that_of_the_whole_matrix() -> None:
    """With orthogonal A and alpha = rank, a step of B moves W by what plain descent does."""
    generator = torch.Generator().manual_seed(1)
    inner = torch.nn.Linear(6, 4, bias=False).double()
    layer = lora.LoraLinear(inner, config.Lora(rank=6, alpha=6.0)).double()
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        layer.lora_a.copy_(torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator))[0])
    whole = inner.weight.detach().clone().requires_grad_()
    F.linear(x, whole).pow(3).sum().backward()
    layer(x).pow(3).sum().backward()
    assert whole.grad is not None
    moved = layer.lora_b.grad @ layer.lora_a
    torch.testing.assert_close(moved, whole.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("bits", "columns"), [(8, 48), (4, 64), (4, 48), (4, 150)])
def test_codes_are_within_half_a_scale_and_multiply_as_the_matrix_they_stand_for(bits: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(bits + columns)
    weight = torch.randn(7, columns, generator=generator)
    codes, scales = lora.quantized(weight, bits)
    again = lora.whole(codes, scales, bits, columns, torch.float32)
    group = columns if bits == 8 else lora.GROUP
    each = scales.repeat_interleave(group, 1)[:, :columns]
    assert ((again - weight).abs() <= each / 2 * (1 + 1e-5)).all()
    assert codes.numel() == 7 * (columns if bits == 8 else -(-columns // lora.GROUP) * lora.GROUP // 2)
    assert torch.equal(lora.whole(codes, scales, bits, columns, torch.bfloat16), again.bfloat16())
    x = torch.randn(3, columns, generator=generator, requires_grad=True)
    answer = lora.FrozenLinear.apply(x, codes, scales, bits)
    assert torch.equal(answer, F.linear(x, again))
    answer.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * answer.detach() @ again)


def test_at_full_rank_a_whole_decoder_s_first_step_is_that_of_full_fine_tuning(
    opened: Callable[..., TuneWorkload],
) -> None:
    """Of every matrix that reads the residual stream (width 32): orthogonal A, alpha = rank, plain descent."""
    targets = ("query", "key", "value", "out", "gate", "up")
    adapted = model_of(opened(config.Lora(rank=32, alpha=32.0, targets=targets)), torch.float64)
    whole = model_of(opened(config.Full()), torch.float64)
    generator = torch.Generator().manual_seed(2)
    for layer in lora.layers(adapted).values():
        drawn = torch.randn(32, 32, dtype=torch.float64, generator=generator)
        layer.lora_a.data = torch.linalg.qr(drawn)[0]
    for model in (whole, adapted):
        model.loss_sum(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    expected = {name: one.grad for name, one in whole.named_parameters()}
    layers = lora.layers(adapted)
    assert len(layers) == 2 * len(targets)
    for name, layer in layers.items():
        assert layer.lora_b.grad is not None
        torch.testing.assert_close(layer.lora_b.grad @ layer.lora_a, expected[f"{name}.weight"], rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        logits = stirred(adapted)(TOKENS)
        torch.testing.assert_close(plain(adapted)(TOKENS), logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("tune", "precision"),
    [
        (KINDS[0], "bf16"),
        (KINDS[1], "fp64"),
        (KINDS[3], "fp32"),
        (KINDS[4], "fp32"),
        (KINDS[5], "bf16"),
        (config.Dpo(rank=0), "fp32"),
    ],
)
def test_the_plan_prices_the_frozen_weights_as_they_are_stored_and_no_copies_of_them(
    opened: Callable[..., TuneWorkload], tune: config.Adapters, precision: str
) -> None:
    workload = opened(tune, precision=precision)
    model = model_of(workload, torch.float64 if precision == "fp64" else torch.float32)
    frozen = [one for one in model.parameters() if not one.requires_grad]  # codes and scales too
    request = of_recipe(workload.recipe)
    assert request.profile.frozen == sum(one.numel() * one.element_size() for one in frozen)
    plan = decide(request, clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n')).plan
    assert plan.predicted is not None
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    each = {"fp32": 4, "bf16": 6, "fp64": 8}[precision]
    assert plan.predicted.memory_bytes["frozen"] == request.profile.frozen
    assert plan.predicted.state_bytes["params"] <= each * trained
    assert plan.predicted.sent_bytes.get("gradients", 0) <= each * trained * 1.1


@pytest.mark.parametrize("frozen", ["bf16", "int8", "int4"])
def test_weights_in_fewer_bits_are_read_one_by_one(
    opened: Callable[..., TuneWorkload], monkeypatch: pytest.MonkeyPatch, frozen: Any
) -> None:
    tune = config.Lora(rank=4, frozen=frozen)
    workload = opened(tune)
    whole = super(TuneWorkload, workload).build(torch.device("cpu"), torch.float32)
    expected = lora.adapt(whole, tune, workload.recipe.train.seed)
    given: list[ref[torch.Tensor]] = []

    def watched(model: gpt.GPT, folder: Path) -> Callable[[str], torch.Tensor]:
        value = weights_of(model, folder)

        def watch(name: str) -> torch.Tensor:
            assert not any(tensor() is not None for tensor in given), "a matrix is whole, and the next is read"
            made = value(name)
            if name.startswith("blocks.") and made.dim() == 2:
                given.append(ref(made))
            return made

        return watch

    weights_of = hf.weights_of
    monkeypatch.setattr(hf, "weights_of", watched)
    built = model_of(workload)
    assert len(given) == 14
    for (name, left), (other, right) in zip(built.named_parameters(), expected.named_parameters(), strict=True):
        assert (name, left.dtype, left.requires_grad) == (other, right.dtype, right.requires_grad)
        assert torch.equal(left, right)
    assert torch.equal(built(TOKENS), expected(TOKENS))
