import torch
from torch import nn

from espalier.optim import adamw
from espalier.optim.base import names_of, owned_by
from espalier.recipe import Adamw


def small(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def train(model, step, count=6):
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        x = torch.randn(11, 7, generator=generator, dtype=next(model.parameters()).dtype)
        model.zero_grad()
        model(x).square().sum().backward()
        step()


def test_fused_with_state_made_in_advance_equals_torchs_plain_adamw():
    options = Adamw(learning_rate=1e-2, weight_decay=0.3)
    ours, theirs = small(torch.float64), small(torch.float64)
    optimizer = adamw.build(options, owned_by(ours))
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2, betas=options.betas, eps=options.epsilon, foreach=False, fused=False,
    )  # fmt: skip
    train(ours, lambda: optimizer.step(1.0))
    train(theirs, plain.step)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_the_factor_scales_the_rate():
    slow, fast = small(), small()
    half = adamw.build(Adamw(learning_rate=2e-2), owned_by(slow))
    full = adamw.build(Adamw(learning_rate=1e-2), owned_by(fast))
    train(slow, lambda: half.step(0.5))
    train(fast, lambda: full.step(1.0))
    for mine, other in zip(slow.parameters(), fast.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_saved_state_continues_bit_for_bit():
    whole, first = small(), small()
    a = adamw.build(Adamw(learning_rate=1e-2), owned_by(whole))
    b = adamw.build(Adamw(learning_rate=1e-2), owned_by(first))
    train(whole, lambda: a.step(1.0))
    train(first, lambda: b.step(1.0))
    second = small()
    second.load_state_dict(first.state_dict())
    c = adamw.build(Adamw(learning_rate=1e-2), owned_by(second))
    c.load_state_dict({key: value.clone() for key, value in b.state_dict().items()})
    train(whole, lambda: a.step(1.0), 3)
    train(second, lambda: c.step(1.0), 3)
    for mine, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_state_is_named_after_the_parameters_and_ties_are_listed_once():
    model = small()
    model[2].weight = nn.Parameter(model[2].weight)
    tied = nn.ModuleDict({"a": model[0], "b": model[0]})
    assert set(names_of(tied).values()) == {"a.weight", "a.bias"}
    state = adamw.build(Adamw(learning_rate=1e-2), owned_by(tied)).state_dict()
    assert set(state) == {f"a.{n}/{k}" for n in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")}
