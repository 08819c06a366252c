"""Tables for a paper: LaTeX with the package booktabs, every text escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fedloom.report.layout import layout, parts

WIDTH = 80  # characters that a small font has on a line of a page
SPECIAL: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # at the beginning of a row it would be an option of the line break before it, as would a star
    "*": "{*}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "…": r"\ldots{}",
    "\u2009": r"\,",
}


def escaped(text: str) -> str:
    """Text on one line that LaTeX prints as it is."""
    line = re.sub(r"[\r\n\t]+", " ", text)
    apart = re.split("(?<=[-–])(?=[-–])", line)  # hyphens and dashes side by side would become a longer dash
    return "{}".join("".join(SPECIAL.get(letter, letter) for letter in part) for part in apart)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, bold: Sequence[tuple[int, int]] = ()
) -> str:
    """A table with a caption, in as many parts below each other as a page is wide; the first column is a label.

    bold: (row, column) of cells to stand out, from 0.
    """
    cells = [head, *rows]
    shown = [[_cell(text, (row, k) in bold) for k, text in enumerate(line)] for row, line in enumerate(rows)]
    heads = [_stacked(lines, "r" if k else "l") for k, lines in enumerate(layout(cells)[0])]
    made = [[0, *part] for part in parts(cells, WIDTH)]
    tabulars = [_tabular([[line[k] for k in part] for line in (heads, *shown)]) for part in made]
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering\small",
            rf"  \caption{{{escaped(caption)}}}",
            "\n\n  \\medskip\n".join(tabulars),
            r"\end{table}",
            "",
        ]
    )


def _cell(text: str, bold: bool) -> str:
    return rf"\textbf{{{escaped(text)}}}" if bold else escaped(text)


def _stacked(lines: Sequence[str], side: str) -> str:
    """A head on one line or several."""
    told = r" \\ ".join(map(escaped, lines))
    return rf"\begin{{tabular}}[b]{{@{{}}{side}@{{}}}}{told}\end{{tabular}}" if len(lines) > 1 else told


def _tabular(cells: Sequence[Sequence[str]]) -> str:
    head, *body = (rf"    {' & '.join(line)} \\" for line in cells)
    columns = f"l{'r' * (len(cells[0]) - 1)}"
    return "\n".join(
        [
            rf"  \begin{{tabular}}{{{columns}}}",
            r"    \toprule",
            head,
            r"    \midrule",
            *body,
            r"    \bottomrule",
            r"  \end{tabular}",
        ]
    )
