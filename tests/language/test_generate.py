"""The cache changes speed, never a token; draws repeat by seed."""

from __future__ import annotations

import pytest
import torch

from espalier import recipe as config
from espalier.cli import input_check
from espalier.language import generate, gpt, moe
from espalier.recipe import defaults
from espalier.recipe.errors import UserError


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(kind=config.Gpt, context=12) -> gpt.GPT:
    size = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48, "vocabulary": 29}
    options = defaults.resolve(config.Recipe(model=kind(**size, context=context)))[0].model
    model = moe.MOE(options) if kind is config.Moe else gpt.GPT(options)
    gpt.initialise(model, 3)
    with torch.no_grad():  # as initialised, a model repeats its last token
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.double()


@torch.no_grad()
def greedy_without_cache(model, ids, tokens):
    """The plain reference: the whole window through the model for every token."""
    window, made = ids[-model.size.context :], []
    for _ in range(tokens):
        made.append(int(model(torch.tensor([window]))[0, -1].argmax()))
        window = [*window, made[-1]]
        if len(window) > model.size.context:
            window = window[-(model.size.context // 2) :]
    return made


@pytest.mark.parametrize("kind", [config.Gpt, config.Moe])
@pytest.mark.parametrize("prompt", [[3], list(range(11)), list(range(12)), list(range(25))])
def test_greedy_with_cache_equals_greedy_without_also_past_the_context(kind, prompt):
    model = made(kind)
    wanted = greedy_without_cache(model, prompt, 40)
    assert list(generate.generate(model, prompt, tokens=40)) == wanted
    assert len(set(wanted)) > 2


def test_only_the_last_context_tokens_of_a_prompt_count():
    model = made()
    long, short = [1, 2, 3, *range(12)], list(range(12))
    assert list(generate.generate(model, long, tokens=5)) == list(generate.generate(model, short, tokens=5))


def test_a_context_of_one_token_goes_on():
    assert len(list(generate.generate(made(context=1), [5], tokens=4))) == 4


def test_draws_repeat_by_seed_and_differ_between_seeds():
    model = made()
    one, again, other = (
        list(generate.generate(model, [1, 2], tokens=30, temperature=1.0, seed=seed)) for seed in (5, 5, 6)
    )
    assert one == again
    assert one != other


def test_draws_without_a_seed_leave_the_global_generator_alone():
    model = made()
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    list(generate.generate(model, [1], tokens=3, temperature=1.0))
    assert torch.equal(torch.rand(1), wanted)


def test_top_1_and_a_tiny_temperature_are_greedy():
    model = made()
    greedy = list(generate.generate(model, [4, 2], tokens=20))
    assert list(generate.generate(model, [4, 2], tokens=20, temperature=1.0, top_k=1, seed=0)) == greedy
    assert list(generate.generate(model, [4, 2], tokens=20, temperature=1e-9, seed=0)) == greedy
    assert list(generate.generate(model, [4, 2], tokens=20, temperature=5e-324, top_k=3, seed=0)) == greedy


def test_top_k_draws_only_among_the_k_likeliest():
    model, prompt = made(), [7, 7, 1]
    with torch.no_grad():
        likeliest = set(model(torch.tensor([prompt]))[0, -1].topk(3).indices.tolist())
    drawn = {
        next(generate.generate(model, prompt, tokens=1, temperature=5.0, top_k=3, seed=seed)) for seed in range(40)
    }
    assert drawn == likeliest


def test_a_draw_follows_the_softmax_at_its_temperature():
    logits = torch.tensor([0.0, 2.0, 4.0, -1.0])
    choose = generate._Choice(2.0, None, torch.Generator().manual_seed(0))
    shares = torch.bincount(torch.tensor([choose(logits) for _ in range(4000)]), minlength=4) / 4000
    assert (shares - (logits / 2.0).softmax(-1)).abs().max() < 0.03


def test_it_ends_before_the_stop_token():
    model = made()
    free = list(generate.generate(model, [4], tokens=20))
    stop = free[-1]
    assert list(generate.generate(model, [4], tokens=20, stop=stop)) == free[: free.index(stop)]


def test_gradients_stay_on_for_the_caller():
    for _ in generate.generate(made(), [1], tokens=2):
        assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("prompt", "sampling", "named"),
    [
        ([], {}, "empty"),
        ([29], {}, "29"),
        ([-1], {}, "-1"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_k": 0}, "top_k"),
        ([1], {"seed": 2**63}, "seed"),
        ([1], {"seed": -(2**63) - 1}, "seed"),
        ([1], {"tokens": 0}, "tokens = 0"),
        ([1], {"tokens": -5}, "tokens = -5"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_the_first_token(prompt, sampling, named):
    with pytest.raises(UserError, match=named):
        generate.generate(made(), prompt, **{"tokens": 1, **sampling})


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 0])
def test_any_seed_of_64_bits_draws(seed):
    assert len(list(generate.generate(made(), [1], tokens=2, temperature=1.0, seed=seed))) == 2


def test_a_prompt_of_bytes_that_are_not_text_is_mended(tmp_path):
    assert input_check.prompt("a\udcff") == "a\N{REPLACEMENT CHARACTER}"
    (tmp_path / "prompt.txt").write_text("né")
    assert input_check.prompt(f"@{tmp_path}/prompt.txt") == "né"
    assert input_check.prompt("né") == "né"


@pytest.mark.parametrize("text", ["@", "@absent\udcff.txt", "@/"])
def test_an_input_file_that_cannot_be_read_is_named(text):
    with pytest.raises(UserError) as refused:
        input_check.prompt(text)
    assert str(refused.value).encode()
    assert ("@FILE" if text == "@" else "cannot be read") in str(refused.value)
