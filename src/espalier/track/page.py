"""HTML pages of one look: run report, plan, job trace. Each is one file without outside resources, dark and light.

Each fills the blocks of page.html.j2. What a template is given is escaped, control characters as on terminals. Its one
script is uPlot with charts.js; the page's policy names its hash, so that a browser runs no other.
"""

from __future__ import annotations

import re
from base64 import b64encode
from datetime import datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from espalier.recipe import units
from espalier.recipe.terminal import visible
from espalier.track import charts


class Figure(NamedTuple):
    """One headline figure."""

    label: str
    value: str
    note: str = ""


def render(template: str, **values: Any) -> str:
    """The page of a template, which is named by its place in the package."""
    return visible(environment().get_template(template).render(values))


@cache
def environment() -> Any:
    """Of the templates in this package; Jinja2 is loaded when a page is made."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {
        name: getattr(units, name) for name in ("plural", "show_count", "show_rate", "show_seconds", "show_size")
    } | {"units": charts.UNITS}
    made.globals |= {
        "script": Markup(script()),
        "script_hash": script_hash(),
        "uplot_style": Markup(_uplot("uPlot.min.css")),
    }
    made.filters |= {
        "moment": moment,
        "percent": signed,
        "coded": _coded,
        "place": place,
        "json": charts.as_json,
        "least": np.min,
        "greatest": np.max,
    }
    return made


@cache
def script() -> str:
    """The script of every page, with uPlot's licence."""
    charts_js = Path(__file__).with_name("charts.js").read_text(encoding="utf-8")
    return f"/*\n{_uplot('LICENSE')}\n*/\n{_uplot('uPlot.iife.min.js')}\n{charts_js}"


def script_hash() -> str:
    """As a Content-Security-Policy names the script."""
    return "sha256-" + b64encode(sha256(script().encode()).digest()).decode()


def _uplot(name: str) -> str:
    return (Path(__file__).parent / "uplot" / name).read_text(encoding="utf-8")


def place(value: float) -> str:
    """A coordinate: a tenth is as fine as can be seen."""
    return f"{value:.1f}".removesuffix(".0")


def moment(seconds: float) -> str:
    """A time since 1970 as people write it, on this machine's clock."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%-d %B %Y, %H:%M")


def signed(value: float | None) -> str:
    """A share with its sign, `+9.4%` or `+12%`; empty where it is not known."""
    return "" if value is None else f"{value:+.0%}" if abs(value) >= 0.095 else f"{value:+.1%}"


def _coded(text: str) -> Markup:
    """What stands between backquotes as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
