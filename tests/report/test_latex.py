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
        r"  \centering",
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
