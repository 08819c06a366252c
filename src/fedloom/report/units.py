"""Numbers as people read them; every function turns None into the same dash."""

from __future__ import annotations

NONE = "–"


def percent(value: float | None) -> str:
    """A fraction as a percentage with one decimal: 0.6333 -> "63.3 %"."""
    return NONE if value is None else f"{_no_minus_zero(100 * value, 1):.1f} %".replace("-", "−")


def points(value: float | None) -> str:
    """A difference of fractions in percentage points: 0.25 -> "25.0 pp"."""
    return NONE if value is None else f"{_no_minus_zero(100 * value, 1):.1f} pp".replace("-", "−")


def signed_points(value: float | None) -> str:
    """A change in percentage points, with its sign: 0.05 -> "+5.0 pp"."""
    return f"+{points(value)}" if value is not None and round(100 * value, 1) > 0 else points(value)


def decimal(value: float | None) -> str:
    """Four significant digits: 2.30258 -> "2.303"."""
    return NONE if value is None else f"{value:.4g}"


def count(value: int | None) -> str:
    """Thousands set apart by a thin space; None -> a dash."""
    return NONE if value is None else f"{value:,}".replace(",", "\u2009")


def short_count(value: float | None) -> str:
    """Three significant digits and a unit: 1540000 -> "1.54 M"."""
    return NONE if value is None else _scaled(float(value), 1000.0, ("", "k", "M", "G", "T", "P"))


def byte_size(value: float | None) -> str:
    """Three significant digits in powers of 1024: 1536 -> "1.5 KiB"."""
    return NONE if value is None else _scaled(float(value), 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def duration(seconds: float | None) -> str:
    """Seconds as "850 ms", "12.3 s", "4 min 05 s" or "2 h 03 min"."""
    if seconds is None:
        return NONE
    if round(seconds, 3) < 1:
        return f"{1000 * seconds:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def _scaled(value: float, step: float, units: tuple[str, ...]) -> str:
    unit = 0
    while abs(value) >= step and unit < len(units) - 1:
        value, unit = value / step, unit + 1
    digits = f"{value:.0f}" if abs(value) >= 100 or unit == 0 else f"{value:.3g}"
    return f"{digits} {units[unit]}".strip()


def _no_minus_zero(value: float, digits: int) -> float:
    return round(value, digits) or 0.0
