"""Rules are data: the product's own are sound, and a wrong one of a user's is named with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.ops import rules
from espalier.ops.taxonomy import REASONS
from espalier.recipe.errors import UserError

HEALTHY, ALARMING = (
    (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8").splitlines() for name in ("healthy", "alarming")
)
"""Lines of logs of jobs that went well, and a line for each kind of failure."""


def test_the_products_rules_name_every_reason_once_at_least():
    told = {rule.reason for rule in rules.built_in_rules()}
    assert set(REASONS) <= told | {"Unknown", "Hang"}  # a hang is what a supervisor saw, not what a log says
    assert len({rule.id for rule in rules.built_in_rules()}) == len(rules.built_in_rules())


def test_rules_refer_to_rules_that_there_are():
    names = {rule.id for rule in rules.built_in_rules()}
    assert all(other in names for rule in rules.built_in_rules() for other in rule.after)


def matched(line):
    found = rules.book(rules.built_in_rules()).first(line)
    return found and found[0]


@pytest.mark.parametrize("line", HEALTHY)
def test_no_rule_takes_a_healthy_line_for_a_failure(line):
    rule = matched(line)
    assert rule is None or rule.role in ("noise", "healthy"), rule.id


@pytest.mark.parametrize("line", [line for line in ALARMING if not line.startswith("Traceback")])
def test_every_kind_of_failure_is_known(line):
    rule = matched(line)
    assert rule is not None
    assert rule.role not in ("noise", "healthy"), rule.id


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("CUDA error: .*", ("cuda error: ",)),
        (r"\bXid\b.*: 74", (": 74",)),
        ("ab|cd", ("ab", "cd")),
        ("(?:ab)?cdef", ("cdef",)),
        ("[ab]cd", ("cd",)),
        (".*", ("",)),
        (r"(?:fatal|lost).{0,9}x", ("fatal", "lost")),
        (r"(?-i:[A-Z]\w*(?:Error|Fault))", ("error", "fault")),
    ],
)
def test_the_texts_of_which_every_match_holds_one(pattern, words):
    assert rules._certain(pattern, "here") == words


def test_looking_for_those_texts_first_changes_nothing():
    lines = [
        *HEALTHY,
        *ALARMING,
        *(Path(__file__).parent / "said.txt").read_text().splitlines(),
    ]
    for line in lines:
        for rule in rules.built_in_rules():
            plain = next((found for one in rule.patterns if (found := rules.compiled(one).search(line))), None)
            if rule.excuses(line):
                plain = None
            fast = rules.book((rule,)).first(line)
            assert (fast and fast[1].group()) == (plain and plain.group())
        asked = next(
            ((rule, found[1]) for rule in rules.built_in_rules() if (found := rules.book((rule,)).first(line))), None
        )
        first = rules.book(rules.built_in_rules()).first(line)
        assert (first and (first[0], first[1].span())) == (asked and (asked[0], asked[1].span()))


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


GOOD = "[[rule]]\nid = 'ours'\nreason = 'OS Error'\npatterns = ['lustre says no']\naction = 'retry'\n"


def test_a_users_rules_are_asked_first(tmp_path):
    found = rules.with_users(write(tmp_path, GOOD))
    assert found[0].id == "ours"
    assert found[0].action == "retry"
    assert found[1:] == rules.built_in_rules()
    assert rules.with_users(None) == rules.built_in_rules()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            GOOD + "[[rule]]\nid = 'bad'\nreason = 'OS Error'\npatterns = ['ok', 'a(b']\n",
            r"rule 2 \(bad\): pattern 2 .*missing \).*character 2",
        ),
        (GOOD.replace("OS Error", "OS Eror"), "reason = 'OS Eror'"),
        (GOOD.replace("'retry'", "'restart'"), "action = 'restart'"),
        (GOOD + "role = 'cause'\n", "role = 'cause'"),
        (GOOD + "pattern = 'x'\n", "no key 'pattern'"),
        (GOOD.replace("['lustre says no']", "'lustre'"), "patterns must be a list"),
        (GOOD.replace("['lustre says no']", "[]"), "patterns must be a list"),
        (GOOD + "unless = '['\n", "unless is not a regular expression"),
        ("rule = 3", "holds no rules"),
        ("", "holds no rules"),
        ("[[rule", "cannot be read"),
    ],
)
def test_a_wrong_rule_is_named_with_its_place(tmp_path, text, says):
    with pytest.raises(UserError, match=says) as error:
        rules.read(write(tmp_path, text))
    assert "mine.toml" in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        rules.read(tmp_path / "no.toml")
