"""The command line. `app` is the Typer application; each module holds the commands of one kind."""

from __future__ import annotations

from fedloom.cli.application import app
from fedloom.cli.doctor import doctor
from fedloom.cli.inspect import list_known, show_data
from fedloom.cli.train import resume, run
from fedloom.cli.use import export, predict, report

app.command("run")(run)
app.command("resume")(resume)
app.command("list")(list_known)
app.command("show-data")(show_data)
app.command("predict")(predict)
app.command("report")(report)
app.command("export")(export)
app.command("doctor")(doctor)

__all__ = ["app"]
