"""Laws of `compose`: an order that serves every need, the same for every order of asking, or a refusal that helps."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.plan.compose import Claim, Composition, Refusal, compose, require
from espalier.recipe import recipe_file
from espalier.recipe.errors import UserError
from espalier.train import table

PACKAGE = Path(__file__).parents[2] / "src" / "espalier"
WORDS = ["a", "b", "c", "d", "e", "f"]
PROPERTIES = ["whole", "split", "drifting", "agreed"]
some = st.frozensets(st.sampled_from(PROPERTIES), max_size=2)


@st.composite
def claim_sets(draw: st.DrawFn) -> list[Claim]:
    names = draw(st.lists(st.sampled_from(WORDS), unique=True, max_size=6))
    return [
        Claim(
            name=name,
            question=draw(st.sampled_from([name, name, name, "shard", "sync"])),
            needs=draw(some) if draw(st.booleans()) else frozenset(),
            changes=draw(some),
            forbids=draw(some) if draw(st.integers(0, 7)) == 0 else frozenset(),
            after=draw(st.frozensets(st.sampled_from([*WORDS, "shard", "sync"]), max_size=1)),
            instead=tuple(draw(st.lists(st.sampled_from(WORDS), max_size=2))),
            alone=draw(st.booleans()),
        )
        for name in names
    ]


def claim(name: str, question: str = "", **rest: object) -> Claim:
    sets = {key: frozenset(value) for key, value in rest.items() if isinstance(value, set)}
    others = {key: value for key, value in rest.items() if key not in sets}
    return Claim(name, question or name, **sets, **others)  # type: ignore[arg-type]


def refused(*claims: Claim, known: tuple[Claim, ...] = ()) -> Refusal:
    found = compose(claims, known)
    assert isinstance(found, Refusal)
    return found


@given(claim_sets(), st.randoms())
def test_the_answer_does_not_depend_on_the_order_of_asking(claims: list[Claim], random: object) -> None:
    shuffled = list(claims)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert compose(shuffled, claims) == compose(claims, shuffled)


@given(claim_sets())
def test_every_need_is_met_by_something_earlier_and_nothing_forbidden_is_present(claims: list[Claim]) -> None:
    found = compose(claims)
    if isinstance(found, Refusal):
        return
    table = {claim.name: claim for claim in claims}
    assert sorted(found.names) == sorted(table)
    for position, name in enumerate(found.names):
        before = [table[other] for other in found.names[:position]]
        others = [other for other in claims if other.name != name]
        assert all(any(need in other.changes for other in before) for need in table[name].needs)
        assert not any(table[name].forbids & other.changes for other in others)
        later = [other for other in others if other not in before]
        assert not any({other.name, other.question} & table[name].after for other in later)
        rivals = [other for other in others if other.question == table[name].question]
        assert not rivals or not (table[name].alone or any(other.alone for other in rivals))


@given(claim_sets())
def test_a_refusal_names_present_mechanisms_and_something_to_do(claims: list[Claim]) -> None:
    found = compose(claims)
    if isinstance(found, Composition):
        return
    assert set(found.pair) <= {claim.name for claim in claims}
    assert found.reason
    assert found.instead
    with pytest.raises(UserError) as error:
        require(claims)
    assert all(name in str(error.value) for name in found.pair)


@given(claim_sets(), st.sampled_from(["A", "bb", "zz"]))
def test_a_claim_that_concerns_nobody_keeps_the_order_of_the_others(claims: list[Claim], name: str) -> None:
    found = compose(claims)
    if isinstance(found, Composition):
        wider = compose([*claims, claim(name)])
        assert isinstance(wider, Composition)
        assert tuple(other for other in wider.names if other != name) == found.names


@given(claim_sets())
def test_an_exchange_that_is_offered_would_be_accepted(claims: list[Claim]) -> None:
    known = [claim(name, "shard", changes={"whole"}) for name in ("plain", "plainer")]
    found = compose(claims, known)
    if isinstance(found, Composition) or " instead of " not in found.instead:
        return
    offer, _, given_up = found.instead.partition(" instead of ")
    chosen = {other.name: other for other in (*claims, *known)}.get(offer.split(" = ")[1])
    if chosen is not None:
        kept = {other for other in claims if other.name != given_up}
        assert isinstance(compose({*kept, chosen}), Composition)


def test_who_brings_a_property_is_applied_before_who_needs_it() -> None:
    claims = [claim("a", needs={"x"}), claim("b", needs={"y"}, changes={"x"}), claim("c", changes={"x", "y"})]
    assert require(claims) == ("c", "b", "a")


def test_nothing_composes_to_nothing() -> None:
    assert compose([]) == Composition(())
    assert require([]) == ()


def test_two_answers_to_one_question_are_refused() -> None:
    found = refused(claim("co2", "sync"), claim("every_step", "sync"))
    assert found.pair == ("co2", "every_step")
    assert "'sync'" in found.reason
    assert found.instead == "choose one: co2 or every_step"


def test_answers_that_are_not_alone_stand_side_by_side_but_not_beside_one_that_is() -> None:
    clip, noise = claim("clip", "gradients", alone=False), claim("noise", "gradients", alone=False)
    assert require([noise, clip]) == ("clip", "noise")
    assert refused(noise, clip, claim("alone", "gradients")).pair[0] == "alone"
    assert set(refused(noise, clip, claim("zero", "gradients")).pair) <= {"clip", "noise", "zero"}


def test_an_unmet_need_names_who_would_bring_it_and_who_stands_in_its_place() -> None:
    muon = claim("muon", "optimizer", needs={"whole matrices"}, instead=("adamw",))
    split = claim("amsp", "shard", changes={"split matrices"})
    known = (claim("replicate", "shard", changes={"whole matrices"}), claim("adamw", "optimizer"))
    found = refused(muon, split, known=known)
    assert found.pair == ("muon", "amsp")
    assert found.reason == "muon needs whole matrices, which replicate would bring"
    assert found.instead == "optimizer = adamw instead of muon"


def test_an_unmet_need_that_nobody_meets_says_so() -> None:
    found = refused(claim("muon", needs={"whole matrices"}))
    assert found.pair == ("muon", "muon")
    assert "no mechanism there is would bring" in found.reason
    assert found.instead == "leave out muon"


def test_a_mechanism_does_not_serve_its_own_need() -> None:
    assert "needs x" in refused(claim("a", needs={"x"}, changes={"x"})).reason


def test_i_and_nobody_else_is_said_by_bringing_and_forbidding_the_same() -> None:
    owner = claim("every_step", "sync", changes={"owns the optimizer step"}, forbids={"owns the optimizer step"})
    assert require([owner]) == ("every_step",)
    found = refused(owner, claim("luwu", "shard", changes={"owns the optimizer step"}))
    assert found.pair == ("every_step", "luwu")


def test_a_cycle_is_refused_and_named_in_order() -> None:
    found = refused(claim("a", after={"b"}), claim("b", after={"c"}), claim("c", after={"a"}), claim("d", after={"a"}))
    assert found.reason == "each must be applied before the next: a -> c -> b -> a"
    assert found.pair == ("a", "c")


def test_after_holds_for_names_and_for_questions() -> None:
    assert require([claim("a", "compile", after={"recompute"}), claim("z", "recompute")]) == ("z", "a")
    assert require([claim("a", "compile", after={"z"}), claim("z", "recompute")]) == ("z", "a")


def test_the_first_declared_choice_that_works_is_offered() -> None:
    stale = claim("sylvie", "sync", changes={"drift"}, instead=("co2", "every_step"))
    check = claim("checksum", "faults", forbids={"drift"})
    known = (claim("co2", "sync", changes={"drift"}), claim("every_step", "sync"))
    assert refused(stale, check, known=known).instead == "sync = every_step instead of sylvie"


def test_an_offer_is_in_the_words_of_a_command_line_where_there_are_any() -> None:
    muon = claim("muon", "optimizer", forbids={"cuts"}, instead=("adamw",))
    adamw = replace(claim("adamw", "optimizer"), option="train.optimizer.kind=adamw")
    found = refused(muon, claim("tensor", changes={"cuts"}), known=[adamw])
    assert found.instead == "train.optimizer.kind=adamw instead of muon"


@pytest.mark.parametrize("option", sorted(filter(None, (one.option for one in table.KNOWN))))
def test_every_option_that_is_offered_is_one_of_the_recipe(option: str) -> None:
    key, _, value = option.partition("=")
    assert str(dict(recipe_file.leaves(recipe_file.to_table(recipe_file.from_table({}, "it", [option]))))[key]) == value


def test_one_name_for_two_mechanisms_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="called a"):
        compose([claim("a", "sync"), claim("a", "shard")])


def claims_in_the_code() -> list[Claim]:
    """Every claim that a module declares at its top level, or a table of claims beside it, read from their texts:
    importing them all would load torch."""
    names = {"Claim": Claim, "compose": SimpleNamespace(Claim=Claim), "frozenset": frozenset}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            call = node.value if isinstance(node, ast.Assign) else None
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("Claim", "compose.Claim"):
                found.append(eval(ast.unparse(call), names))
    table = tomllib.loads((PACKAGE / "train" / "table.toml").read_text(encoding="utf-8"))
    return [*found, *(Claim(name, **claim) for name, claim in table.items())]


def test_the_codes_claims_have_names_of_their_own_and_needs_that_another_meets() -> None:
    """A property spelled in two ways would be needed for ever and brought in vain."""
    claims = claims_in_the_code()
    names = [claim.name for claim in claims]
    assert len(set(names)) == len(names) > 3
    questions = {claim.question for claim in claims}
    for claim in claims:
        assert set(claim.instead) <= set(names), claim.name
        for need in claim.needs:
            met = any(need in other.changes for other in claims if other is not claim)
            assert met, f"{claim.name} needs {need}"
    assert {"shard", "sync", "stages", "optimizer"} <= questions
