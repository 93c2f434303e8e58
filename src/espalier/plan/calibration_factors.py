"""What calibration may change: one factor for each kind of coefficient, 1 where nothing was measured. No torch."""

from __future__ import annotations

from espalier.recipe.serialization import Value


class CostFactors(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"activations": "held"}):
    """Each multiplies the seconds (or bytes) that the datasheet and the constants of `plan` give. All positive."""

    product: float = 1.0
    """Seconds of dense products per FLOP."""
    small: float = 1.0
    """What products lose by small rows, columns or inner sizes (datasheet devices only)."""
    attention: float = 1.0
    """Seconds of the attention core."""
    memory: float = 1.0
    """Seconds of everything that reads and writes memory."""
    issue: float = 1.0
    """Seconds the host needs to issue one operation."""
    inside: float = 1.0
    """Seconds per byte on links inside a machine."""
    between: float = 1.0
    """Seconds per byte on links between machines."""
    call: float = 1.0
    """Seconds of latency and launch of each collective."""
    exposed: float = 1.0
    """Share of communication that computation cannot hide."""
    stall: float = 1.0
    """Seconds that stages of a pipeline wait at each hand-over."""
    activations: float = 1.0
    """Bytes of activations and of the allocator's slack."""


PLAIN = CostFactors()
"""Nothing calibrated."""
