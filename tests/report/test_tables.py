import io

from rich.console import Console

from fedloom.report.tables import markdown_table, run_title, summary_lines, summary_table, summary_text

SUMMARY = {
    "method": "fedfmx",
    "preset": "paper",
    "dataset": "a[b]",
    "seed": 0,
    "final_accuracy": 0.5,
    "forgetting": None,
    "backward_transfer": 0.01,
    "bytes_up": 2048,
    "sample_visits": 34512,
    "failed_clients": 0,
    "rejected_updates": 3,
}


def test_lines_leave_out_what_does_not_apply():
    assert summary_lines(SUMMARY) == [
        ("Final accuracy", "50.0 %"),
        ("Backward transfer", "+1.0 pp"),
        ("Sent by clients", "2 KiB"),
        ("Sample visits", "34\u2009512"),
        ("Rejected updates", "3"),
    ]


def test_title():
    assert run_title(SUMMARY) == "fedfmx (paper) on a[b], seed 0"
    assert run_title({}) == "run"


def test_rich_table_shows_everything_and_reads_no_markup():
    out = io.StringIO()
    Console(file=out, width=80).print(summary_table(SUMMARY))
    shown = out.getvalue()
    assert "on a[b]" in shown
    assert all(part in shown for line in summary_lines(SUMMARY) for part in line)


def test_plain_text_is_aligned():
    lines = summary_text(SUMMARY).splitlines()
    assert lines[0] == run_title(SUMMARY)
    assert len({len(line) for line in lines[1:]}) == 1
    assert summary_text({}) == "run"


def test_markdown():
    text = markdown_table({"a|b": SUMMARY, "c\nd": {"final_accuracy": 0.25}})
    lines = text.splitlines()
    assert lines[0] == "|  | a\\|b | c d |"
    assert lines[2] == "| Final accuracy | 50.0 % | 25.0 % |"
    assert "| Backward transfer | +1.0 pp | – |" in lines
    assert "Forgetting" not in text
