"""Codecs by the names that plans, recipes and hooks use: `codec("int8")`, `codec("zfp:8")`, `codec("topk:0.01")`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from espalier.comm.base import Codec, Traffic
from espalier.comm.exact import EXACT
from espalier.comm.finite_check import MARK, FiniteCheck
from espalier.recipe.errors import UserError, nearest


def _load(name: str) -> Any:
    """The class of the codec in the file `name`."""
    module = import_module(f"espalier.mechanisms.codecs.{name}")
    return getattr(module, name.capitalize())


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"Codec {name!r} got {text!r} for its number.", do=f"{name}:{_EXAMPLES[name]}") from None


def _lowbit(bits: int) -> Callable[[str], Codec]:
    def made(text: str) -> Codec:
        if text not in ("", "stochastic", "nearest"):
            raise UserError(f"int{bits} rounds {text!r}.", do=f"int{bits} (nearest) or int{bits}:stochastic")
        return _load("lowbit")(bits, stochastic=text == "stochastic")

    return made


def _plain(name: str) -> Callable[[str], Codec]:
    def without(text: str) -> Codec:
        if text:
            raise UserError(f"Codec {name!r} takes no number, and got {text!r}.", do=name)
        return EXACT if name == EXACT.name else _load(name)()

    return without


_EXAMPLES = {"zfp": "8", "topk": "0.01", "mpc": "1"}
FAMILIES: dict[str, Callable[[str], Codec]] = {
    "exact": _plain("exact"),
    "bf16": _plain("bf16"),
    "int8": _lowbit(8),
    "int4": _lowbit(4),
    "int1": _lowbit(1),
    "split": _plain("split"),
    "sparse": _plain("sparse"),
    "mpc": lambda text: _load("mpc")(int(_number("mpc", text or "1"))),
    "zfp": lambda text: _load("zfp")(_number("zfp", text or "8")),
    "topk": lambda text: _load("topk")(_number("topk", text or "0.01")),
}

MARGIN = 1.2
"""Compression must beat the raw link by this factor, as it takes cores from computation."""
AUTO: dict[Traffic, str] = {
    Traffic.GRADIENTS: "int8",
    Traffic.OUTER_STEP: "int8",
    Traffic.ACTIVATIONS: "split",
    Traffic.KEYS_VALUES: "split",
    Traffic.PARAMETERS: "split",
}
"""What `auto` asks about, class by class: gradients hard, the rest without loss."""
SPARSE = "sparse"
"""What `auto` asks about beside it for gradients, where it is told how many of them are zero."""


def codec(name: str | Codec) -> Codec:
    """The codec called `name`: a family, and after a colon its number or manner. A codec is returned as it is.

    A name that ends in `!` stops the run where a value is not finite; else such values are sent as they are.

    Raises:
        UserError: there is no such family (the nearest is named), or its number is out of range.

    >>> codec("zfp:8").name, codec("int4").name
    ('zfp:8', 'int4')
    """
    if not isinstance(name, str):
        return name
    if name.endswith(MARK):
        return FiniteCheck(codec(name.removesuffix(MARK)))
    family, _, text = name.partition(":")
    if family not in FAMILIES:
        near = nearest(family, FAMILIES)
        why = f"there are {', '.join(FAMILIES)}"
        raise UserError(f"No codec is called {name!r}.", why=why, do=near or "int8")
    return FAMILIES[family](text)
