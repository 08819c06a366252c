"""Tables for a paper: LaTeX with the package booktabs, every text escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
    parts = re.split("(?<=[-–])(?=[-–])", line)  # hyphens and dashes side by side would become a longer dash
    return "{}".join("".join(SPECIAL.get(letter, letter) for letter in part) for part in parts)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, bold: Sequence[tuple[int, int]] = ()
) -> str:
    """A table with a caption; the first column is a label. bold: (row, column) of cells to stand out, from 0."""

    def line(cells: Sequence[str], row: int | None = None) -> str:
        shown = (
            rf"\textbf{{{escaped(cell)}}}" if (row, column) in bold else escaped(cell)
            for column, cell in enumerate(cells)
        )
        return f"    {' & '.join(shown)} \\\\"

    body = [line(cells, row) for row, cells in enumerate(rows)]
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escaped(caption)}}}",
            rf"  \begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            r"    \toprule",
            line(head),
            r"    \midrule",
            *body,
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )
