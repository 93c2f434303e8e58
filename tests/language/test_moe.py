"""The mixture of experts: even routing costs 1, its penalty is a sum over samples, and evaluation leaves it out."""

from __future__ import annotations

import pytest
import torch

from espalier import recipe as config
from espalier.kernels import rtopk
from espalier.language import gpt, hf, moe
from espalier.recipe import defaults
from espalier.recipe.errors import UserError


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(seed=1, **changes) -> moe.MOE:
    size = {"depth": 2, "width": 32, "heads": 2, "feed_forward": 48, "vocabulary": 61, "context": 16, "experts": 4}
    options = defaults.resolve(config.Recipe(model=config.Moe(**{**size, **changes})))[0].model
    model = moe.MOE(options)
    gpt.initialise(model, seed)
    return model.double()


def batch(size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(61, (size, 16), generator=generator) for _ in range(2))


def gradients(model, tokens, targets):
    model.zero_grad()
    model.loss_sum(tokens, targets).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_even_routing_has_imbalance_1_and_one_expert_for_all_has_their_number():
    chosen = torch.arange(4).repeat(2, 2)[:, :, None]
    assert moe.imbalance(torch.zeros(2, 8, 4), chosen).tolist() == [1.0, 1.0]
    scores = torch.zeros(2, 8, 4)
    scores[..., 2] = 100.0
    torch.testing.assert_close(moe.imbalance(scores, torch.full((2, 8, 1), 2)), torch.tensor([4.0, 4.0]))


def test_imbalance_equals_its_definition():
    torch.manual_seed(0)
    scores = torch.randn(3, 7, 5, dtype=torch.float64)
    chosen = scores.topk(2, -1).indices
    for sample in range(3):
        shares = [(chosen[sample] == expert).sum() / 14 for expert in range(5)]
        means = scores[sample].softmax(-1).mean(0)
        wanted = 5 * sum(share * mean for share, mean in zip(shares, means, strict=True))
        torch.testing.assert_close(moe.imbalance(scores, chosen)[sample], wanted)


@pytest.mark.parametrize("cut", [[1, 1, 1, 1], [3, 1], [2, 2]])
def test_loss_and_gradients_do_not_depend_on_how_the_batch_is_cut(cut):
    model, (tokens, targets) = made(balance=0.5), batch()
    targets[1, 4:] = gpt.IGNORED
    whole = gradients(model, tokens, targets)
    parts = zip(tokens.split(cut), targets.split(cut), strict=True)
    added = [sum(each) for each in zip(*(gradients(model, *part) for part in parts), strict=True)]
    for left, right in zip(whole, added, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def test_the_penalty_is_balance_times_imbalance_of_each_target():
    tokens, targets = batch()
    without, with_it = made(balance=0.0), made(balance=0.5)
    difference = with_it.loss_sum(tokens, targets) - without.loss_sum(tokens, targets)
    per_target = difference.item() / 0.5 / targets.numel()
    assert 2.0 <= per_target < 2.2  # two layers, nearly even at the start, where all scores are nearly equal


def test_evaluation_leaves_the_penalty_out():
    tokens, targets = batch()
    model = made(balance=0.5).eval()
    torch.testing.assert_close(model.loss_sum(tokens, targets), gpt.cross_entropy_sum(model(tokens), targets))
    assert model.train().loss_sum(tokens, targets) > model.eval().loss_sum(tokens, targets)


def test_the_penalty_drives_the_router_towards_even_use():
    torch.manual_seed(0)
    experts = moe.Experts(made(balance=1.0).size)
    with torch.no_grad():
        experts.router.weight[2] = 0.1  # with inputs round 0.5, everybody likes expert 2
    optimizer = torch.optim.SGD(experts.router.parameters(), lr=0.2)
    x = torch.randn(8, 16, 32) + 0.5
    seen = []
    for _ in range(60):
        _, uneven = experts(x)
        seen.append(uneven.mean().item())
        optimizer.zero_grad()
        uneven.mean().backward()
        optimizer.step()
    assert seen[0] > 1.3
    assert seen[-1] < 1.15


def test_every_parameter_has_a_gradient_even_where_no_token_came():
    model = made(experts=8, active=1)
    tokens, targets = batch(1)
    assert all(gradient.isfinite().all() for gradient in gradients(model, tokens[:, :2], targets[:, :2]))


def test_route_can_be_replaced():
    model, calls = made(), []
    tokens, _ = batch()
    plain = model(tokens)
    inner = model.blocks[0].feed_forward.route

    def route(x, chosen, weights, experts):
        calls.append((x.shape, chosen.shape, len(experts)))
        torch.testing.assert_close(weights.sum(-1), torch.ones(64, dtype=torch.float64))
        return inner(x, chosen, weights, experts)

    for block in model.blocks:
        block.feed_forward.route = route
    assert torch.equal(model(tokens), plain)
    assert calls == [((64, 32), (64, 2), 4)] * 2


def test_the_z_loss_is_the_mean_square_of_logsumexp():
    without, with_it = made(balance=0.0), made(balance=0.0, z_loss=0.5)
    tokens, targets = batch()
    seen = []
    for block in with_it.blocks:
        block.feed_forward.router.register_forward_hook(lambda *one: seen.append(one[2]))
    difference = with_it.loss_sum(tokens, targets) - without.loss_sum(tokens, targets)
    wanted = sum(0.5 * one.logsumexp(-1).square().sum() for one in seen)
    torch.testing.assert_close(difference, wanted, rtol=1e-9, atol=1e-9)


def test_a_bias_picks_experts_and_leaves_weights_and_loss_alone():
    model, plain = made(balancing="bias"), made(balance=0.0)
    tokens, targets = batch()
    torch.testing.assert_close(model.loss_sum(tokens, targets), plain.loss_sum(tokens, targets))
    with torch.no_grad():
        model.blocks[0].feed_forward.router.bias[3] = 2.0
    seen = []
    inner = model.blocks[0].feed_forward.route
    model.blocks[0].feed_forward.route = lambda *one: seen.append(one[1]) or inner(*one)
    model.loss_sum(tokens, targets).backward()
    assert (seen[0] == 3).any(1).all()
    shares = seen[0].flatten().bincount(minlength=4) / seen[0].numel()
    wanted = (shares.double() - 0.25) * targets.numel()
    torch.testing.assert_close(model.blocks[0].feed_forward.router.bias.grad, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cut", [[1, 1, 1, 1], [3, 1]])
def test_gradients_of_bias_and_z_loss_do_not_depend_on_how_the_batch_is_cut(cut):
    model, (tokens, targets) = made(balancing="bias", z_loss=0.1), batch()
    whole = gradients(model, tokens, targets)
    parts = zip(tokens.split(cut), targets.split(cut), strict=True)
    added = [sum(each) for each in zip(*(gradients(model, *part) for part in parts), strict=True)]
    torch.testing.assert_close(whole, added, rtol=1e-9, atol=1e-12)


def test_the_bias_drives_experts_towards_even_use():
    torch.manual_seed(0)
    experts = moe.Experts(made(balancing="bias").size)
    with torch.no_grad():
        experts.router.weight[2] = 0.1
    optimizer = torch.optim.AdamW([experts.router.bias], lr=0.02, weight_decay=0.0)
    x, shares = torch.randn(8, 16, 32) + 0.5, []
    experts.route = lambda x, chosen, *_: shares.append(chosen.flatten().bincount(minlength=4)) or x
    for _ in range(80):
        optimizer.zero_grad()
        experts(x)[1].sum().backward()
        optimizer.step()
    assert shares[0].max() > 1.6 * shares[0].sum() / 4
    assert shares[-1].max() < 1.3 * shares[-1].sum() / 4


def test_a_bias_is_not_exported_as_mixtral(tmp_path):
    with pytest.raises(UserError, match="picked with a bias, which no format has"):
        hf.export(made(balancing="bias"), None, tmp_path / "out")


@pytest.mark.parametrize("balancing", ["loss", "bias"])
def test_a_router_that_stops_early_takes_the_experts_that_rtopk_takes(balancing, monkeypatch):
    seen = []

    def spy(scores, k, max_iterations, *, sorted):
        best, chosen = rtopk(scores, k, max_iterations, sorted=sorted)
        seen.append((scores.detach(), chosen, max_iterations))
        return best, chosen

    monkeypatch.setattr(moe, "rtopk", spy)
    for limit in (None, 1):
        model = made(experts=32, active=4, max_iterations=limit, balancing=balancing).train()
        model.loss_sum(*batch()).backward()
    missed = [(scores.topk(4).indices.sort().values != chosen.sort().values).any() for scores, chosen, _ in seen]
    assert [limit for *_, limit in seen] == [None, None, 1, 1]
    assert missed[:2] == [False, False]
    assert all(missed[2:])  # one bisection finds the largest, and others that are not
    largest = seen[2][0].argmax(-1, keepdim=True)
    assert (seen[2][1] == largest).any(-1).all()


def test_a_router_that_stops_early_is_not_exported(tmp_path):
    with pytest.raises(UserError, match="a search that ends early") as refused:
        hf.export(made(max_iterations=4), None, tmp_path / "out")
    assert "without model.max_iterations" in str(refused.value)
