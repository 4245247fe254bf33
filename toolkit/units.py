"""Numbers with units for display. Only this module rounds; files keep every digit."""

from __future__ import annotations

from collections.abc import Mapping

MIB = 1 << 20
GIB = 1 << 30  # bytes


def number(value: float) -> str:
    """Three significant digits, or all of a whole number, with separators: 12,345 3.14 0.00271."""
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1):
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def word(value: bool | int | float | str) -> str:
    """The value of a parameter as text; of numbers three digits."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else number(value)


def words(values: Mapping[str, bool | int | float | str]) -> str:
    """Names and values in one line."""
    return ", ".join(f"{name} {word(value)}" for name, value in values.items())


def bracketed(text: str) -> str:
    """The end of a sentence: ' (text)'; '' for ''."""
    return f" ({text})" if text else ""


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 worker, 2 workers."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def seconds(value: float) -> str:
    """A duration in a fitting unit: 812 us, 36.2 ms, 4.25 s, 12 min."""
    size = abs(value)
    if size >= 120:
        return f"{value / 60:.0f} min" if size < 7200 else f"{value / 3600:.1f} h"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if size >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} us" if value else "0 s"


def size(value: float) -> str:
    """Bytes in binary units: 512 B, 1.5 KiB, 79.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"


def percent(value: float) -> str:
    """A percentage with its sign, one decimal: +12.3 %."""
    return f"{round(value, 1) + 0.0:+.1f} %"  # never -0.0
