"""The house keeps its shape: sizes, first lines, names, who imports whom, what is light to import, what is counted."""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from espalier.cli import main as cli
from espalier.recipe import recipe_errors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "espalier"

# The surface of the product. A change here is a decision: each new one needs a reason in CHANGELOG.md.
SURFACE = {"option keys": 234, "verbs": 11, "flags": 46, "public names": 10}

# Modules that must answer before torch could be loaded.
LIGHT = """espalier espalier.cli.main espalier.recipe espalier.recipe.recipe_file espalier.recipe.cost
espalier.recipe.errors espalier.recipe.units espalier.machine.cluster espalier.plan.compose espalier.recipe.records
espalier.plan.base espalier.track.events"""

# Environment variables of Python, torch, their launchers and libraries, Slurm, MPI's mpiexec and the XDG folders; never
# options.
ENVIRONMENT = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(OMP|GOMP)_\w+|HOME|PYTHONPATH"
    r"|(TORCH|TORCHELASTIC|PYTORCH|CUDA|CUBLAS|NCCL|GLOO|SLURM|XDG)_\w+"
    r"|(OMPI_COMM|MV2_COMM|PMI|MPI)_\w+"
)

ENVIRON = re.compile(r"\bos\.(environ|getenv)\b")

# Imports that close a cycle between modules. Remove a line by breaking its cycle; none may be added.
CYCLES = {}

TABLES = {"espalier.comm.codecs"}
"""Modules that list the answers to one Protocol; an answer keeps the file that bears its name."""

REPEATED = """
Choice Cost Crossing DoesNotFit Drawn Draws GraphTransformer Layer Layout Limits Links Manifest
Packed Part Schedule Table _Saved
"""
"""Class names that still stand for more than one class. Remove a name by renaming a class; none may be added."""

BARE = {"one", "found", "told", "said", "kept", "beside", "held", "here", "its", "own"}
"""Words that do not say what a variable holds."""

COMPILED = {"jit", "njit", "vectorize", "guvectorize", "intrinsic", "overload"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(scope="module", autouse=True)
def _trees_without_garbage() -> Iterator[None]:
    """Reading files makes a million objects and no circle: looking for garbage among them takes three times as long.
    They are given back before other tests are run."""
    gc.disable()
    yield
    tree.cache_clear()
    imports.cache_clear()
    gc.enable()


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports() -> dict[str, dict[str, bool]]:
    """Module -> modules of the package it imports, wherever the import stands -> whether only inside functions."""
    modules = {module_of(path): path for path in python_files("src")}
    found: dict[str, dict[str, bool]] = {name: {} for name in modules}
    for name, path in modules.items():
        for node, inside in statements(tree(path)):
            named: list[str] = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [one if one in modules else str(node.module) for one in full]
            for other in {other for other in named if other in modules and other != name}:
                found[name][other] = found[name].get(other, True) and inside
    return found


def statements(block: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Each statement of a file, and whether it stands inside a function."""
    for node in ast.iter_child_nodes(block):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield node, inside
            yield from statements(node, inside or isinstance(node, Function))


def reaches(start: str, goal: str, graph: dict[str, set[str]]) -> bool:
    seen, front = set[str](), {start}
    while front:
        seen |= front
        front = {following for one in front for following in graph[one]} - seen
    return goal in seen


def functions(path: Path) -> Iterator[Function]:
    """Every function that is not the body of a compiled kernel."""
    for node in ast.walk(tree(path)):
        if isinstance(node, Function):
            words = {word for decorator in node.decorator_list for word in re.findall(r"\w+", ast.unparse(decorator))}
            if not words & COMPILED:
                yield node


def length(function: Function) -> int:
    """Lines from `def` to the end, the docstring left out."""
    first = function.body[0]
    docstring = ast.get_docstring(function, clean=False) is not None
    skipped = (first.end_lineno or 0) - first.lineno + 1 if docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - skipped


def parameters(function: Function) -> int:
    words = function.args
    names = [word.arg for word in (*words.posonlyargs, *words.args, *words.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls", "ctx")])  # ctx: autograd's self


def test_no_file_is_longer_than_600_lines() -> None:
    long = {shown(path): n for path in python_files("src", "tests", "bench") if (n := lines(path)) > 600}
    assert not long


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_function_is_longer_than_60_lines() -> None:
    found = [(shown(path), one) for path in python_files("src", "bench") for one in functions(path)]
    assert not {f"{path}:{one.name}": length(one) for path, one in found if length(one) > 60}


def test_no_function_takes_more_than_five_parameters() -> None:
    found = [(shown(path), one) for path in python_files("src") for one in functions(path)]
    long = {f"{path}:{one.name}": parameters(one) for path, one in found if parameters(one) > 5}
    assert not long, "make a struct of what belongs together"


def test_every_module_says_its_purpose_in_its_first_line() -> None:
    silent = []
    for path in python_files("src", "bench"):
        first = path.read_text(encoding="utf-8").splitlines()[:1]
        if not (first and re.match(r'r?"""\S.{9,}', first[0])):
            silent.append(shown(path))
    assert not silent


def test_file_names_are_words_for_what_is_inside() -> None:
    vague = re.compile(r"(utils?|helpers?|common|misc|.*manager.*)\.py")
    assert not [shown(path) for path in python_files("src", "tests", "bench") if vague.fullmatch(path.name)]


def test_no_room_is_empty() -> None:
    rooms = {path.parent for path in python_files("src")}
    empty = [shown(room) for room in rooms if not {*room.glob("[!_]*.py"), *room.glob("*/__init__.py")}]
    assert not empty


def test_nothing_is_left_for_later() -> None:
    later = re.compile(r"NotImplementedError|\b(TODO|FIXME|XXX)\b")
    files = python_files("src", "bench")
    assert not [shown(path) for path in files if later.search(path.read_text(encoding="utf-8"))]


def test_every_module_has_its_line_in_the_contract() -> None:
    """A name that stands on no line could import anything."""
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("layers = [")[2].partition("]")[0]
    named = set(re.findall(r"\w+", contract))
    names = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    modules = {name for name in names if [*(PACKAGE / name).glob("*.py")] or (PACKAGE / f"{name}.py").is_file()}
    assert not modules - named - {"__init__"}


def test_modules_import_one_another_in_no_circle() -> None:
    """Imports for type checkers and inside functions count too: who reads a file should not need its readers."""
    graph = {name: set(others) for name, others in imports().items()}
    circles = {(name, other) for name, others in graph.items() for other in others if reaches(other, name, graph)}
    assert not circles, "what both need belongs into a module below both"


def test_a_small_file_serves_more_than_one_neighbour() -> None:
    """What only its neighbour reads belongs into that neighbour, unless it is loaded when first used (compiled
    kernels), is a question (`base`), one of several answers that a table or a package's face lists, or the `options` or
    the `cost` of a mechanism, which have their names in every folder."""
    found = set()
    for path in python_files("src"):
        name = module_of(path)
        readers = {
            reader: lazy for reader, others in imports().items() for other, lazy in others.items() if other == name
        }
        part = path.stem in ("options", "cost") and name.startswith("espalier.mechanisms.")
        if part or path.stem in ("__init__", "base") or lines(path) >= 80 or len(readers) != 1:
            continue
        ((reader, lazy),) = readers.items()
        if reader.rpartition(".")[0] == name.rpartition(".")[0] and not lazy and reader not in TABLES:
            found.add(name)
    assert not found, "merge it into the file that imports it"


def test_what_must_be_light_loads_no_torch() -> None:
    script = f"import sys, importlib\nfor name in {LIGHT.split()!r}: importlib.import_module(name)\n"
    script += "heavy = {'torch', 'numba', 'transformers', 'rich'} & set(sys.modules)\nassert not heavy, heavy\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr


def test_help_answers_within_0_4_seconds_of_cpu() -> None:
    """Asked again only where it took longer: other processes change CPU seconds a little."""
    assert any(cpu_seconds(sys.executable, "-m", "espalier", "--help") < 0.4 for _ in range(5))


def cpu_seconds(*command: str) -> float:
    """CPU seconds of a program."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_the_surface_grows_only_on_purpose() -> None:
    flags = re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", (PACKAGE / "cli" / "main.py").read_text(encoding="utf-8"))
    flags += [argument["name"] for argument in cli.ARGUMENTS if argument["name"].startswith("--")]
    names = next(node for node in tree(PACKAGE / "__init__.py").body if "__all__" in ast.unparse(node))
    assert isinstance(names, ast.Assign)
    found = {
        "option keys": len(recipe_errors.known_keys()),
        "verbs": len(cli.VERBS),
        "flags": len(flags),
        "public names": len(ast.literal_eval(names.value)),
    }
    assert found == SURFACE


def variables(path: Path) -> set[str]:
    """Capital words in the functions that touch the environment, and in the constants those functions name."""
    if not ENVIRON.search(path.read_text(encoding="utf-8")):
        return set()
    constants = {ast.unparse(node.targets[0]): node for node in tree(path).body if isinstance(node, ast.Assign)}
    found: set[str] = set()
    for node in tree(path).body:
        text = ast.unparse(node)
        if ENVIRON.search(text):
            named = [ast.unparse(constants[name]) for name in re.findall(r"\w+", text) if name in constants]
            found.update(*(re.findall(r"['\"]([A-Z][A-Z0-9_]{2,})['\"]", code) for code in (text, *named)))
    return found


def test_no_option_hides_in_the_environment() -> None:
    files = python_files("src")
    assert not [
        f"{shown(path)}: {name}" for path in files for name in variables(path) if not ENVIRONMENT.fullmatch(name)
    ]


def test_only_the_command_line_and_the_progress_print() -> None:
    speaking = [PACKAGE / "cli" / "main.py", PACKAGE / "cli", PACKAGE / "track"]
    found = []
    for path in python_files("src"):
        calls = [node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
        prints = any(isinstance(call, ast.Name) and call.id == "print" for call in calls)
        if prints and not any(path.is_relative_to(place) for place in speaking):
            found.append(shown(path))
    assert not found


def test_people_read_what_was_made_visible() -> None:
    """`print` is for JSON, which escapes; text for people goes through `recipe.terminal.say`."""
    found = []
    for path in [PACKAGE / "cli" / "main.py", *sorted((PACKAGE / "cli").glob("*.py"))]:
        calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
        prints = [ast.unparse(call) for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        found += [f"{shown(path)}: {text}" for text in prints if "dumps(" not in text]
    assert not found


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    places = [re.escape(str(place)) for place in (ROOT, Path.home()) if len(place.parts) > 1]
    pattern = re.compile(r"(?<![\w.~$}-])(" + "|".join([*places, "/home/[a-z]+", "/Users/[a-z]+"]) + r")(/|\b)")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        text = path.read_bytes().decode("utf-8", "replace") if path.is_file() else ""
        found += [f"{name}: {match[0]}" for match in [pattern.search(text)] if match]
    assert not found


def class_names() -> Counter[str]:
    return Counter(
        node.name for path in python_files("src") for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)
    )


def test_a_class_name_stands_for_one_class() -> None:
    repeated = {name for name, count in class_names().items() if count > 1}
    assert repeated <= set(REPEATED.split())


def bindings(path: Path) -> Iterator[str]:
    """Names of the variables and parameters of a file."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def test_variables_are_named_for_what_they_hold() -> None:
    assert not [f"{shown(path)}: {name}" for path in python_files("src") for name in bindings(path) if name in BARE]
