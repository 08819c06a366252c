"""`predict`, `report` and `export`: what a finished run is good for."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.application import Json, guarded, print_json
from fedloom.terminal import say

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a finished run.")]


class Format(StrEnum):
    """Formats of an exported model."""

    safetensors = "safetensors"
    onnx = "onnx"


@guarded
def predict(
    folder: Folder,
    source: Annotated[
        Path, typer.Option("--input", "-i", metavar="PATH", help="Arrays, an image or a folder of images, or texts.")
    ],
    top: Annotated[int, typer.Option("--top", min=1, help="Classes to print per input.")] = 3,
    client: Annotated[
        int | None, typer.Option("--client", metavar="K", help="Predict as this client does, not globally.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Classify inputs with the global model, or with that of one client; without task or domain.

    Arrays hold inputs as the data set does: for a model trained on 8-bit images values from 0 to 255 (not 0 to 1),
    for any other model numbers on the scale of its training data. Images are brought to the model's size. Texts are the
    lines of a .txt file, or the column `text` of a .csv, .jsonl or .parquet file; questions have the columns of their
    training data without the answer.
    """
    from fedloom.cli.inputs import read_inputs
    from fedloom.cli.text_inputs import read_texts
    from fedloom.served import open_personal, open_served
    from fedloom.served import top as best

    served = open_served(folder) if client is None else open_personal(folder, client)
    if client is not None and not served.method.personal:
        name = served.meta["method"]
        say(f"note: with {name} every client predicts with the global model", err=True)
    if served.text is None:
        labels, x = read_inputs(source, served.meta, lambda text: say(f"note: {text}", err=True))
    else:
        labels, x = read_texts(source, served.text, len(served.class_names))
    rows = [best(scores, served.class_names, top) for scores in served.scores(x).tolist()]
    if as_json:
        found = [
            {"input": label, "class": row[0][0], "scores": dict(row)} for label, row in zip(labels, rows, strict=True)
        ]
        print_json({"predictions": found})
        return
    width = max(len(label) for label in labels)
    for label, row in zip(labels, rows, strict=True):
        say(f"{label:<{width}}  " + "  ".join(f"{name} {score:.3f}" for name, score in row))


@guarded
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs, comparisons or sweeps.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Page to write.")] = None,
) -> None:
    """Write one self-contained page about a run, or about several side by side.

    A comparison stands for its runs, and a sweep for its comparisons; runs that differ in nothing but the seed are
    shown as one, with intervals.
    """
    from fedloom.config.defaults import defaults
    from fedloom.report import write_report

    page = out if out is not None else (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    say(f"report: {write_report(folders, page, defaults=defaults)}")


@guarded
def export(
    folder: Folder,
    form: Annotated[Format, typer.Option("--format", "-f", help="safetensors, or onnx (extra 'onnx').")],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="File to write.")] = None,
    client: Annotated[
        int | None, typer.Option("--client", metavar="K", help="Write this client's own model, not the global one.")
    ] = None,
) -> None:
    """Write the global model, or that of one client, as one file to serve."""
    from fedloom.onnx_export import export_onnx
    from fedloom.safetensors_export import export_safetensors

    stem = "export" if client is None else f"export-client{client}"
    target = out if out is not None else folder / f"{stem}.{form.value}"
    if form is Format.safetensors:
        say(f"model: {export_safetensors(folder, target, client)}")
        return
    path, checked = export_onnx(folder, target, client)
    say(f"model: {path}")
    say(f"check: {checked}")
