"""Tables for a paper: every text printed as it is."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.report.latex import escaped, table

PRINTED = {r"\textbackslash{}": "\\", r"\textasciicircum{}": "^", r"\textasciitilde{}": "~", r"\textless{}": "<",
           r"\textgreater{}": ">", r"\textbar{}": "|", r"\ldots{}": "…", r"$\pm$": "±", "$-$": "−", r"\,": "\u2009",
           "{[}": "[", "{*}": "*", "{}": "", "---": "—", "--": "–"}  # fmt: skip


def printed(text):
    """What LaTeX prints; refuses a special character that is not escaped."""
    pattern = "|".join(map(re.escape, PRINTED)) + r"|\\[{}$&#%_]|."
    out = ""
    for part in re.findall(pattern, text):
        assert part in PRINTED or len(part) == 2 or part not in r"\{}$&#%_^~", part
        out += PRINTED.get(part, part[-1])
    return out


@pytest.mark.parametrize(
    "text",
    [
        "100 % of a_b & c", r"\{}$&#%_^~<>|", "63.3 ± 1.2", "−2 – 3 … 14\u2009380", "[x]* y", "--metric a---b",
        "fedavg+label_scope=current", r"\\end{table}",
    ],
)  # fmt: skip
def test_text_is_printed_as_it_is(text):
    assert printed(escaped(text)) == text


@given(st.text(alphabet="-–a_", max_size=8))
def test_hyphens_and_dashes_stay_apart(text):
    assert printed(escaped(text)) == text


def test_text_stays_on_one_line():
    assert escaped("a\r\n\tb") == "a b"


def test_a_table_has_a_line_per_row_and_bold_cells():
    made = table(["m", "a%"], [["x_1", "1"], ["[y]", "2"]], "c & d", [(1, 1)])
    assert made.splitlines() == [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering\small",
        r"  \caption{c \& d}",
        r"  \begin{tabular}{lr}",
        r"    \toprule",
        r"    m & a\% \\",
        r"    \midrule",
        r"    x\_1 & 1 \\",
        r"    {[}y] & \textbf{2} \\",
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]


def test_a_wide_table_goes_on_below_with_its_labels_again():
    head = ["Method", *(f"Accuracy of domain {k}, %" for k in "abcdefghijkl")]
    made = table(head, [["fedavg", *map(str, range(12))], ["[b]", *"abcdefghijkl"]], "c", [(0, 12)])
    parts = made.split(r"\medskip")
    assert len(parts) > 1 and made.count(r"\begin{table}") == 1 == made.count(r"\caption")
    found = []
    for part in parts:
        columns = len(re.search(r"\\begin\{tabular\}\{l(r+)\}", part)[1])
        rows = [line.strip().removesuffix(r" \\").split(" & ") for line in part.splitlines() if " & " in line]
        assert [row[0] for row in rows] == ["Method", "fedavg", "{[}b]"] and {len(row) for row in rows} == {columns + 1}
        found += zip(*(row[1:] for row in rows), strict=True)
    shown = [
        r"\begin{tabular}[b]{@{}r@{}}Accuracy of \\ domain " + f"{k}, " + r"\%\end{tabular}" for k in "abcdefghijkl"
    ]
    bold = [*map(str, range(11)), r"\textbf{11}"]
    assert found == list(zip(shown, bold, "abcdefghijkl", strict=True))
