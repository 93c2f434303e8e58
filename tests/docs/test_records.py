"""Records: all twenty systems, under every spelling, and none that claims more than the repository holds."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from espalier.recipe import records
from espalier.recipe.errors import UserError
from espalier.recipe.records import Record

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "espalier"
FOLDER = ROOT / "docs" / "measured"
ALL = {record.name: record for record in records.all_records()}
# The nineteen that own a file, and the survey that is the map.
SYSTEMS = ["a2q", "acme", "amsp", "buff", "cbm", "co2", "diskgnn", "flashflex", "flashmoe", "hybrid", "loongtrain"]
SYSTEMS += ["luwu", "mega", "rcmpp", "rtopk", "spikingnerf", "spindle", "survey", "sylvie", "torchgt"]


def is_test(identifier: str) -> bool:
    """Whether `tests/path.py::test_name` exists."""
    file, _, name = identifier.partition("::")
    path = ROOT / file
    if not path.is_file():
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.parse(path.read_text()).body)


def test_all_twenty_systems_have_a_record() -> None:
    assert list(ALL) == SYSTEMS


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_record_claims_no_more_than_there_is(name: str) -> None:
    record = ALL[name]
    there = [(PACKAGE / file).exists() for file in record.files]
    assert record.files
    if record.state == "works":
        assert all(there)
        assert record.law_test, f"{name} works, so a test shows its law"
        assert record.bench, f"{name} works, so a script measures it"
    else:
        assert any(there), f"{name} has no code, so it has no record"
        assert record.state.partition(": ")[2], f"{name} is there in part: say which"
    assert not record.law_test or is_test(record.law_test), record.law_test
    assert not record.bench or (ROOT / record.bench).is_file(), record.bench


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_record_is_complete(name: str) -> None:
    record = ALL[name]
    assert all((record.title, record.paper, record.chosen, record.cost, record.law))
    assert all((record.headline, record.limits, re.match(r"\w+ \d{4}: ", record.runs_on)))
    assert re.search(r"arXiv \d{4}\.\d{5}\b", record.paper)
    assert "`" not in record.cost


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_headline_is_of_a_measured_table(name: str) -> None:
    """Numbers with two decimals are ratios that the system's tables in docs/measured have."""
    files = [FOLDER / f"{name}.json", *FOLDER.glob(f"{name}-*.json")]
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in files if path.is_file()]
    ratios = {f"{row['ratio']:.2f}" for table in tables for row in table["rows"]}
    numbers = re.findall(r"(?<![\d.,])\d+\.\d\d(?![\d.,]\d)", ALL[name].headline)
    assert numbers
    assert set(numbers) <= ratios


def test_every_spelling_leads_to_its_system_and_to_one_only() -> None:
    spellings = [(word, record) for record in ALL.values() for word in (record.name, *record.aliases)]
    for word, record in spellings:
        for form in (word, word.upper(), word.replace("-", " ")):
            assert records.get(form) is record
    plain = [records._plain(word) for word, _ in spellings]
    assert len({(word, record.name) for word, record in spellings}) == len(spellings)
    owners = {word: {record.name for other, record in spellings if records._plain(other) == word} for word in plain}
    assert all(len(names) == 1 for names in owners.values())


@pytest.mark.parametrize(("slip", "meant"), [("amps", "amsp"), ("torchgtt", "torchgt"), ("RTop-L", "rtopk")])
def test_a_slip_is_answered_with_the_nearest_name(slip: str, meant: str) -> None:
    with pytest.raises(UserError) as error:
        records.get(slip)
    assert error.value.do == f"espalier explain {meant}"


def test_nonsense_is_answered_with_all_the_names() -> None:
    with pytest.raises(UserError) as error:
        records.get("qqqqqq")
    assert "amsp" in error.value.why


@pytest.mark.parametrize("name", SYSTEMS)
def test_explaining_says_everything_that_is_recorded(name: str) -> None:
    text = records.explain(name)
    record = ALL[name]
    flat = " ".join(text.split())
    for said in (record.title, record.paper, record.chosen, record.cost, record.law, record.state):
        assert said in flat
    for said in (*record.files, record.headline, record.bench, record.limits, record.runs_on):
        assert said in flat
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 100
    table = records.as_dict(record)
    assert json.loads(json.dumps(table)) == table
    assert table["name"] == name


def test_the_pages_are_what_the_records_and_the_tables_say(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "measured")
    subprocess.run([sys.executable, ROOT / "bench" / "systems.py", tmp_path], check=True)
    for made in tmp_path.rglob("*.md"):
        page = ROOT / "docs" / made.relative_to(tmp_path)
        assert page.read_text(encoding="utf-8") == made.read_text(encoding="utf-8"), "make pages"


def test_the_page_of_systems_is_short() -> None:
    page = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert len(page.split()) <= 6000
    assert {section.splitlines()[0] for section in sections} >= set(SYSTEMS)
    assert max(len(section.splitlines()) for section in sections) <= 25


def test_a_record_lies_beside_the_code_and_nothing_is_imported(tmp_path: Path) -> None:
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard" / "amsp.py").write_text("import a_library_that_is_not_there\n")
    (tmp_path / "shard" / "amsp.toml").write_text('name = "of another file"\n')
    (tmp_path / "shard" / "record_amsp.toml").write_text(
        '# AMSP.\nname = "amsp"\ntitle = "T"\npaper = "arXiv 2311.00257"\nfiles = ["mechanisms/sharding/amsp.py"]\n'
        'chosen = "c"\ncost = "a b"\nlaw = "l"\nstate = "works"\n'
    )
    assert records.read(tmp_path) == (
        Record(
            name="amsp",
            title="T",
            paper="arXiv 2311.00257",
            files=("mechanisms/sharding/amsp.py",),
            chosen="c",
            cost="a b",
            law="l",
            state="works",
        ),
    )
