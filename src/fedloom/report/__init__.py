"""Tables, pictures and a page about runs; reads run folders only."""

from fedloom.report.html import render, write_report
from fedloom.report.plots import save_accuracy
from fedloom.report.record import RunRecord, read_run
from fedloom.report.tables import markdown_table, summary_lines, summary_table, summary_text

__all__ = [
    "RunRecord",
    "markdown_table",
    "read_run",
    "render",
    "save_accuracy",
    "summary_lines",
    "summary_table",
    "summary_text",
    "write_report",
]
