"""The command line. `app` is the Typer application; each module holds the commands of one kind."""

from __future__ import annotations

from fedloom.cli.alignment import alignment
from fedloom.cli.application import app
from fedloom.cli.compare import ablate, compare
from fedloom.cli.deploy import deploy
from fedloom.cli.doctor import doctor
from fedloom.cli.inspect import show_data
from fedloom.cli.listing import list_known
from fedloom.cli.new import new
from fedloom.cli.pretrain import Pretraining, pretrain_clip
from fedloom.cli.reproduce import reproduce
from fedloom.cli.sweep import sweep
from fedloom.cli.train import resume, run
from fedloom.cli.usage import Command, Settable
from fedloom.cli.use import export, predict, report

app.command("run", cls=Settable)(run)
app.command("resume", cls=Command)(resume)
app.command("compare", cls=Settable)(compare)
app.command("sweep", cls=Settable)(sweep)
app.command("ablate", cls=Settable)(ablate)
app.command("reproduce", cls=Settable)(reproduce)
app.command("list", cls=Command)(list_known)
app.command("show-data", cls=Settable)(show_data)
app.command("predict", cls=Command)(predict)
app.command("report", cls=Command)(report)
app.command("export", cls=Command)(export)
app.command("alignment", cls=Command)(alignment)
app.add_typer(new, name="new")
app.add_typer(deploy, name="deploy", help="Take a recipe to a Flower federation: app folder, certificates, demo.")
app.command("pretrain-clip", cls=Pretraining)(pretrain_clip)
app.command("doctor", cls=Command)(doctor)

__all__ = ["app"]
