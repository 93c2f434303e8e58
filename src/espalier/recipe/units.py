"""Sizes, rates and times as people write them (`80GiB`, `400Gbit/s`, `5ms`), to numbers and back."""

from __future__ import annotations

import math
import re

from espalier.recipe.errors import UserError, nearest

_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-zµ/]*)\s*$")

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTP", 1)}
_PREFIXES = {**_DECIMAL, **_BINARY}

_SIZES = {f"{prefix}B": scale for prefix, scale in _PREFIXES.items()}
_RATES = {f"{prefix}B/s": scale for prefix, scale in _PREFIXES.items()}
_RATES |= {f"{prefix}{bit}": scale / 8 for prefix, scale in _PREFIXES.items() for bit in ("bit/s", "bps")}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def size(text: str | float, where: str = "size") -> int:
    """Bytes from `80GiB`, `512MB` or a plain number of bytes. Raises UserError naming `where`."""
    return round(_parse(text, _SIZES, where, "80GiB"))


def rate(text: str | float, where: str = "rate") -> float:
    """Bytes per second from `400Gbit/s`, `300GB/s` or a plain number of bytes per second."""
    return _parse(text, _RATES, where, "400Gbit/s")


def seconds(text: str | float, where: str = "time") -> float:
    """Seconds from `5ms`, `20us`, `2h` or a plain number of seconds."""
    return _parse(text, _TIMES, where, "5ms")


def plural(count: int, what: str) -> str:
    """A number of things: `1 rank`, `1,024 ranks`."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def show_size(count: float) -> str:
    """Bytes in binary units, three significant digits: `1.25 GiB`."""
    return _show(count, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def show_rate(bytes_per_second: float) -> str:
    """Bytes per second in decimal units: `1.25 GB/s`."""
    return _show(bytes_per_second, 1000.0, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def show_bits(bytes_per_second: float) -> str:
    """Bandwidth of a network in decimal bits: `100 Mbit/s`."""
    return _show(8 * bytes_per_second, 1000.0, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def show_count(count: float) -> str:
    """A plain count in decimal units: `1.92 M`."""
    return _show(count, 1000.0, ("", "k", "M", "B", "T")).strip()


def show_flops(per_second: float) -> str:
    """Operations per second: `80.1 GFLOP/s`."""
    return _show(per_second, 1000.0, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def show_seconds(value: float) -> str:
    """A duration at the scale people think in: `350 µs`, `12.0 ms`, `3.2 s`, `4 min 05 s`, `2 h 10 min`."""
    if not math.isfinite(value):
        return f"{value} s"
    if value < 0:
        return "-" + show_seconds(-value)
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _parse(text: str | float, units: dict[str, float], where: str, example: str) -> float:
    if isinstance(text, int | float) and not isinstance(text, bool):
        if not 0 <= text < math.inf:
            raise UserError(f"{where} is not a quantity: {text}.", do=f'write it like "{example}"')
        return float(text)
    match = _NUMBER.match(str(text))
    if not match:
        raise UserError(f"{where} is not a quantity: {text!r}.", do=f'write it like "{example}"')
    number, unit = float(match[1].replace("_", "")), match[2]
    if unit == "" and "s" in units:
        return number
    if unit == "":
        raise UserError(f"{where} has no unit: {text!r}.", do=f'write it like "{example}"')
    if unit not in units:
        near = nearest(unit, units) or next((known for known in units if known.lower() == unit.lower()), None)
        hint = f'write it like "{example}"' + (f" (did you mean {near}?)" if near else "")
        raise UserError(f"{where} has an unknown unit {unit!r} in {text!r}.", do=hint)
    if not math.isfinite(number * units[unit]):
        raise UserError(f"{where} is too large: {text!r}.", do=f'write it like "{example}"')
    return number * units[unit]


def _show(value: float, base: float, names: tuple[str, ...]) -> str:
    scale = 0
    size_ = abs(value)
    while size_ >= base * 0.9995 and scale < len(names) - 1:
        size_ /= base
        scale += 1
    shown = value / base**scale
    if scale == 0 and float(value).is_integer():
        return f"{int(value)} {names[0]}"
    digits = 0 if abs(shown) >= 100 else 1 if abs(shown) >= 10 else 2
    return f"{shown:.{digits}f} {names[scale]}"
