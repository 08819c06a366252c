"""`alignment`: do pictures and class texts of finished vision-language runs meet?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.application import Json, guarded, print_json
from fedloom.terminal import say


@guarded
def alignment(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of finished vision-language runs.")],
    client: Annotated[
        int | None, typer.Option("--client", metavar="K", help="Measure this client's own model, not the global one.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("--template", metavar="TEXT", help="Of the zero-shot rows.", show_default="a photo of a {}."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank test pictures and class texts: recall at 1 both ways and the alignment score, beside zero-shot CLIP.

    One row per stage whose checkpoint the run kept (checkpoint.keep), and the final model's.
    """
    from fedloom.alignment import TEMPLATE, text
    from fedloom.alignment import alignment as rows_of
    from fedloom.alignment import as_json as plain

    wanted = TEMPLATE if template is None else template
    found = [(folder, rows_of(folder, client=client, template=wanted)) for folder in folders]
    if as_json:
        print_json({"runs": [{"folder": str(f.absolute()), "rows": plain(rows)} for f, rows in found]})
        return
    for folder, rows in found:
        if len(found) > 1:
            say(str(folder))
        say(text(rows))
