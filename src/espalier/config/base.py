"""What all option structs have in common. Imports no torch."""

from __future__ import annotations

from msgspec import Struct


class Options(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all option structs: frozen, keyword only, unknown keys are errors."""


class Choice(Options, frozen=True, tag_field="kind"):
    """Base of the alternatives of a tagged union; the key `kind` says which one is meant."""
