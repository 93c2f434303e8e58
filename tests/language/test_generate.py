"""The cache changes speed, never a token; draws repeat by seed."""

from __future__ import annotations

import math

import pytest
import torch

from espalier import recipe as config
from espalier.cli import input_check
from espalier.language import generate, gpt, moe
from espalier.language.kv_cache import PIECE
from espalier.language.tokenizer import open_tokenizer
from espalier.recipe import defaults
from espalier.recipe.errors import UserError
from espalier.train.workload_row import Sampling, TextPiece


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(kind=config.Gpt, context=12, **more) -> gpt.GPT:
    size = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48, "vocabulary": 29, **more}
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


@pytest.mark.sampled(3)
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
    draw = generate._Draw(Sampling(temperature=2.0, seed=0))
    shares = torch.bincount(torch.tensor([draw(logits) for _ in range(4000)]), minlength=4) / 4000
    assert (shares - (logits / 2.0).softmax(-1)).abs().max() < 0.03


def test_top_p_draws_only_among_the_likeliest_that_reach_it():
    logits = torch.tensor([0.1, 0.5, 0.1, 0.3]).log()
    for top_p, possible in ((0.2, {1}), (0.5, {1}), (0.51, {1, 3}), (1.0, {0, 1, 2, 3})):
        draw = generate._Draw(Sampling(temperature=1.0, top_p=top_p, seed=0))
        assert {draw(logits) for _ in range(200)} == possible


PROMPTS = [[3], [5, 4, 3, 2, 1], list(range(11)), list(range(25)), [7, 7], [1]]
SAMPLINGS = [
    Sampling(tokens=30),
    Sampling(tokens=3),
    Sampling(tokens=40, temperature=1.0, seed=3),
    Sampling(tokens=9),
    Sampling(tokens=20, temperature=0.7, seed=3, top_p=0.9),
    Sampling(tokens=20, temperature=1.3, seed=4, top_k=5),
]
SIZES = {
    "gpt": {},
    "moe": {"kind": config.Moe},
    "window": {"window": 4},
    "capped": {"attention_cap": 5.0, "family": "gemma2", "window": 4, "logit_cap": 8.0},
}


def written(model, prompts, samplings):
    """The tokens of each prompt, all continued together."""
    decoding, tokens = generate.Decoding(model, prompts, samplings), [[] for _ in prompts]
    while decoding.rows:
        for row, (token, _) in decoding.step().items():
            tokens[row].append(token)
        decoding.end([row for row, sampling in enumerate(samplings) if len(tokens[row]) == sampling.tokens])
    return tokens


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("read", [3, 512])
def test_prompts_together_have_the_tokens_of_each_alone(size, read, monkeypatch):
    monkeypatch.setattr(generate, "READ", read)
    model = made(**SIZES[size])
    alone = [written(model, [prompt], [how])[0] for prompt, how in zip(PROMPTS, SAMPLINGS, strict=True)]
    assert written(model, PROMPTS, SAMPLINGS) == alone
    assert [len(row) for row in alone] == [sampling.tokens for sampling in SAMPLINGS]


def test_the_head_is_asked_about_the_last_place_only(monkeypatch):
    model, places = made(), []
    monkeypatch.setattr(model, "predict", lambda x, words, last: places.append(last) or gpt.predict(x, words, last))
    list(generate.generate(model, list(range(9)), tokens=3))
    assert places == [1, 1, 1]


def test_the_cache_has_room_for_the_tokens_it_holds():
    model = made(context=400)
    decoding = generate.Decoding(model, [[1] * 100, [2] * 37], [Sampling(), Sampling()])
    for _ in range(40):
        decoding.step()
        past = decoding._cache.layers[0]
        assert past.length <= past.rows.shape[3] < past.length + PIECE
    decoding.end([0])
    assert past.rows.shape == (2, 1, 2, past.length, 8)
    assert past.length == 37 + 39


# --- text ---------------------------------------------------------------------------------------------------------


def texts(given, endings=(), **sampling):
    """The pieces of text of these bytes, and why it ends."""
    text = generate.WrittenText(open_tokenizer("bytes"), Sampling(**sampling), endings)
    pieces = []
    for token in given:
        pieces.append(text.add(0, token, torch.zeros(257)))
        if pieces[-1].finish:
            break
    return [piece.text for piece in pieces], pieces[-1].finish


def test_text_comes_as_soon_as_nothing_can_change_it():
    assert texts(b"abc") == (["a", "b", "c"], None)
    assert texts("aéb".encode()) == (["a", "", "é", "b"], None)
    assert texts(b"ab", tokens=2) == (["a", "b"], "length")
    assert texts("é".encode()[:1], tokens=1) == (["\N{REPLACEMENT CHARACTER}"], "length")


def test_text_ends_before_stops_and_endings():
    assert texts(b"a123x", stop=("12x", "23")) == (["a", "", "", "1"], "stop")
    assert texts(b"a12b", stop=("12x",)) == (["a", "", "", "12b"], None)
    assert texts(b"a12", stop=("12x",), tokens=3) == (["a", "", "12"], "length")
    assert texts(b"ab12c", [list(b"12")]) == (["a", "b", "", ""], "stop")
    assert texts(b"a1bc", [list(b"12"), [99]]) == (["a", "", "1b", ""], "stop")
    assert texts(b"a1", [list(b"12")], tokens=2) == (["a", "1"], "length")


def test_the_log_probability_of_a_token_is_named_with_the_likeliest():
    text = generate.WrittenText(open_tokenizer("bytes"), Sampling(logprobs=2), [])
    logits = torch.full((257,), -50.0).double()
    logits[[97, 98]] = torch.tensor([0.25, 0.75]).double().log()
    score = text.add(0, 97, logits).score
    assert (score.text, [name for name, _ in score.likeliest]) == ("a", ["b", "a"])
    assert score.logprob == score.likeliest[1][1] == pytest.approx(math.log(0.25))


def test_pieces_of_a_row_do_not_wait_for_those_of_others():
    pieces = iter([TextPiece(1, "a"), TextPiece(0, "b"), TextPiece(1, "c", "stop"), TextPiece(0, "d", "length")])
    first, second = generate.by_row(pieces, 2)
    assert next(first).text == "b"
    assert [piece.text for piece in second] == ["a", "c"]
    assert [piece.text for piece in first] == ["d"]


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
