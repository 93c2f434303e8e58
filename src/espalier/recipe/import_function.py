"""Imports a function that a recipe names, `build = "package.module:function"`.

Whatever its author's code raises becomes a UserError that names the line.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from espalier.recipe.errors import EspalierError, UserError, nearest

KEPT_CODE = "code"
"""Folder, in that of what a run keeps, of the sources of the function that its recipe names."""

_KEPT = f"{os.sep}preprocessing{os.sep}{KEPT_CODE}{os.sep}"
_INSTALLED = {"site-packages", "dist-packages"}


class Author(NamedTuple):
    """Whose code is called: `build` as the recipe names it, and the file that holds it (empty when not known)."""

    build: str
    file: str

    @contextmanager
    def answers(self, doing: str) -> Iterator[None]:
        """Makes any exception of the block, SystemExit too, the author's: a UserError naming it and its line."""
        try:
            yield
        except EspalierError:
            raise
        except (Exception, SystemExit) as error:
            raise self.failure(doing, error) from error

    def failure(self, doing: str, error: BaseException) -> UserError:
        """The UserError for `error`, raised by this author's code while `doing`."""
        message = f"{type(error).__name__}: {error}".rstrip(" .:")
        return UserError(
            f"model.build = {self.build!r} failed {doing}: {message}.",
            why=self.place(error),
            do="correct it there; docs/module.md shows what is expected",
        )

    def place(self, error: BaseException) -> str:
        """`file:line` of the last call in the author's file on the way to `error`, empty when there is none."""
        if isinstance(error, SyntaxError) and error.filename:
            return f"{error.filename}:{error.lineno}"
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
        return f"{self.file}:{lines[-1]}" if lines else ""


def function(text: str, folder: str | Path | None) -> tuple[Callable[..., Any], Author]:
    """The function that `text`, "package.module:function", names, and whose it is.

    The module is looked for in `folder`, then in the current folder, then where Python looks. Raises UserError.
    """
    name, colon, attribute = text.partition(":")
    if not colon or not name or not attribute:
        raise UserError(f"model.build = {text!r} names no function.", do='model.build = "package.module:function"')
    first = [*([] if folder is None else [str(Path(folder).resolve())]), os.getcwd()]
    if folder is not None:
        _forget_others(Path(folder).resolve())
    sys.path[:] = [*dict.fromkeys(first), *(place for place in sys.path if place not in first)]
    try:
        module = importlib.import_module(name)
    except EspalierError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"model.build = {text!r}: {error}.",
                why=f"looked in {', '.join(dict.fromkeys(first))} and among the installed modules",
                do="put the module beside the recipe, or install it",
            ) from error
        raise Author(text, _file(name)).failure("when it was imported", error) from error
    attribute_value = getattr(module, attribute, None)
    if attribute_value is None:
        near = nearest(attribute, [name for name in vars(module) if not name.startswith("_")])
        raise UserError(
            f"model.build = {text!r}: {name} has no {attribute!r}.", do=f"did you mean {near}?" if near else ""
        )
    if not callable(attribute_value):
        raise UserError(f"model.build = {text!r} is not a function.")
    return attribute_value, Author(text, getattr(module, "__file__", None) or "")


def keep_sources(text: str, place: Path) -> None:
    """Copies the module of the function that `text` names, and the modules beside it that were imported, into the
    folder `KEPT_CODE` of `place`. What is installed stays where it is."""
    for name, origin in sources(text).items():
        target = place / KEPT_CODE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, target)


def sources(text: str) -> dict[Path, Path]:
    """The module of the function that `text` names, and the modules beside it that were imported, without those that
    are installed: each file, by its path in their folder."""
    name = text.partition(":")[0]
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "").resolve()
    package = file.name == "__init__.py"
    root = file.parents[name.count(".") + package] if len(file.parents) > name.count(".") + package else file.parent
    if file.suffix != ".py" or _INSTALLED & set(root.parts) or str(root) == sysconfig.get_paths()["stdlib"]:
        return {}
    files = {}
    for module in list(sys.modules.values()):
        origin = Path(getattr(module, "__dict__", {}).get("__file__") or "")  # a few modules of torch give a name alone
        if not (origin.is_absolute() and origin.suffix == ".py" and origin.is_file()):
            continue
        origin = origin.resolve()
        if origin.is_relative_to(root) and not _INSTALLED & set(origin.parts):
            files[origin.relative_to(root)] = origin
    return files


def unchanged_sources(place: Path, folder: Path | None) -> bool:
    """Whether all sources that `keep_sources` has put into `place` are still so in `folder`, beside their data."""
    code = place / KEPT_CODE
    copies = {file.relative_to(code): file for file in code.rglob("*.py")}
    return not copies or (folder is not None and all(_same_text(folder / name, copy) for name, copy in copies.items()))


def _forget_others(folder: Path) -> None:
    """Forgets modules that were imported from what another run keeps; and where `folder` is what a run keeps, modules
    of the names there that are not the same."""
    sources = {file.relative_to(folder): file for file in folder.rglob("*.py")} if folder.name == KEPT_CODE else {}
    ours = {".".join(name.with_suffix("").parts).removesuffix(".__init__"): file for name, file in sources.items()}
    loaded = {name: getattr(module, "__dict__", {}).get("__file__") or "" for name, module in list(sys.modules.items())}
    others = {name for name, file in loaded.items() if _KEPT in file and not Path(file).is_relative_to(folder)}
    if any(loaded.get(name) and not _same_text(Path(loaded[name]), file) for name, file in ours.items()):
        others |= ours.keys()
    for name in others:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def _same_text(first: Path, other: Path) -> bool:
    return first.is_file() and first.read_bytes() == other.read_bytes()


def _file(name: str) -> str:
    """The file of a module that could not be imported, empty when that is not known."""
    spec = None
    with suppress(Exception, SystemExit):
        spec = importlib.util.find_spec(name)
    return (spec.origin or "") if spec else ""
