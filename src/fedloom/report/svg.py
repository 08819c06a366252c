"""Figures as markup for a page, whose inks and series are CSS variables, so that the page can restyle them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fedloom.report.plots import INK, LINE, MUTED, PAPER, SERIES, figure, look

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.4, 3.1  # inches of a picture, whose letters can then be read on a phone and in half a page

VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", PAPER: "--card"} | {
    c: f"--series-{i}" for i, c in enumerate(SERIES)
}


def legend_mark(i: int) -> str:
    """SVG markup of a short line that looks like the i-th run's."""
    color, marker, stroke = look(i)
    dashes = {"-": "", "--": "7 3", "-.": "7 3 2 3", ":": "2 3"}.get(stroke) if isinstance(stroke, str) else None
    dashes = " ".join(str(2 * v) for v in stroke[1]) if dashes is None else dashes
    points = {
        "s": "14,2 22,2 22,10 14,10", "^": "18,1 23,11 13,11", "D": "18,0 24,6 18,12 12,6", "v": "18,11 23,1 13,1",
        "P": "16,1 20,1 20,4 23,4 23,8 20,8 20,11 16,11 16,8 13,8 13,4 16,4",
    }  # fmt: skip
    shape = f'<polygon points="{points[marker]}"/>' if marker in points else '<circle cx="18" cy="6" r="4.5"/>'
    ink = f"var({VARIABLES[color]})"
    line = (
        f'<line x1="0" y1="6" x2="36" y2="6" stroke="{ink}" stroke-width="2.4" stroke-dasharray="{dashes or "none"}"/>'
    )
    return f'<svg class="mark" viewBox="0 0 36 12" aria-hidden="true" fill="{ink}">{line}{shape}</svg>'


def picture(name: str, draw: Callable[[Axes], None], width: float = WIDTH, height: float = HEIGHT) -> Markup:
    """What `draw` makes of axes of that size in inches, as markup.

    It enters a page unescaped, so it holds no text of the user's.
    """
    from markupsafe import Markup

    made = figure(width, height)
    draw(made.subplots())
    return Markup(svg(made, name))


def legend(names: Sequence[str]) -> list[tuple[str, Markup]]:
    """Every name with the mark of its line."""
    from markupsafe import Markup

    return [(name, Markup(legend_mark(i))) for i, name in enumerate(names)]


def svg(made: Figure, name: str) -> str:
    """SVG markup for use inside a page: no prologue, ids prefixed by `name`, colours as CSS variables.

    The title of the figure's axes is its label for screen readers.
    """
    out = io.StringIO()
    made.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = out.getvalue()
    label = made.axes[0].get_title(loc="left")
    text = text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    return _with_variables(text, VARIABLES)


def _with_variables(text: str, variables: Mapping[str, str]) -> str:
    for color, variable in variables.items():
        text = re.sub(color, f"var({variable})", text, flags=re.IGNORECASE)
    return text
