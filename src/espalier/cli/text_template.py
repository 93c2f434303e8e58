"""Text templates: files that verbs write for people and other programs. Jinja2 is loaded when one is filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def render(name: str, filters: Mapping[str, Callable[..., str]], /, **values: Any) -> str:
    """The template `name` of this folder with `values` filled in, which `filters` write as its language has them."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= filters
    return str(made.get_template(name).render(values))
