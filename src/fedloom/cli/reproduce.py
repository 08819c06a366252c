"""`reproduce`: a paper's claims tried at a scale, with a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.application import (
    Device,
    DryRun,
    Engine,
    Json,
    Quiet,
    Root,
    Set,
    Verbose,
    Workers,
    fail,
    guarded,
    layers,
    print_json,
)
from fedloom.cli.compare import Jobs, Seeds, joined, teller
from fedloom.cli.completion import claims as claim_ids
from fedloom.cli.train import watched
from fedloom.terminal import say

if TYPE_CHECKING:
    from fedloom.claims import Claim, Outcome
    from fedloom.claims.trial import Prepared

    Carry = Callable[[Prepared], Outcome]


class Scale(StrEnum):
    """How much is run."""

    smoke = "smoke"
    small = "small"
    paper = "paper"


@guarded
def reproduce(
    claims: Annotated[
        list[str],
        typer.Argument(
            metavar="CLAIM...",
            help="Ids such as X10, or all; `fedloom list claims` shows them.",
            autocompletion=claim_ids,
        ),
    ],
    scale: Annotated[
        Scale,
        typer.Option("--scale", help="smoke: about a minute, no verdict; small: two cores; paper: its recipe, GPUs."),
    ] = Scale.small,
    seeds: Seeds = None,
    sets: Set = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="DIR", help="Folder of the runs.", show_default="runs/reproduce/RECIPE"),
    ] = None,
    engine: Engine = None,
    data_root: Root = None,
    device: Device = None,
    workers: Workers = None,
    jobs: Jobs = "1",
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Try claims of papers: the paper's numbers beside ours, how the protocols differ, and a verdict.

    Runs are made once and shared by all claims of a recipe; the same command goes on where it was interrupted. A claim
    is held only if the order is the paper's and the 95 % intervals are apart, over three seeds or more.
    """
    from fedloom.claims import chosen
    from fedloom.comparison.jobs import checked

    checked(jobs)
    tell = teller(quiet or as_json)
    layer = layers(sets=sets, engine=engine, root=data_root, device=device, workers=workers)
    given = {"seeds": joined(seeds), "out": out, "tell": tell, "layer": layer}
    watch = partial(watched, quiet=quiet or as_json, verbose=verbose)
    tried = _Tried(as_json)
    for claim in chosen(claims):
        carry = None if dry_run else lambda prepared: prepared.carry_out(watch, tell, jobs)
        tried.attempt(claim, scale.value, given, carry)
    tried.end()


class _Tried:
    """Claims that were tried so far: printed one by one, or all at the end as JSON."""

    def __init__(self, as_json: bool):
        self.as_json = as_json
        self.told: list[dict[str, Any]] = []
        self.errors: list[tuple[str, int]] = []

    def attempt(self, claim: Claim, scale: str, given: dict[str, Any], carry: Carry | None) -> None:
        """Try one claim; what cannot be run does not stop the others. carry: makes the runs; None only lists them."""
        from fedloom.claims import prepare, report
        from fedloom.core.errors import FedloomError, Interrupted

        try:
            prepared = prepare(claim, scale, **given)
            if carry is None:
                self._show(_runs(prepared), _preview(prepared))
                return
            outcome = carry(prepared)
        except Interrupted:
            raise
        except FedloomError as error:
            self.errors.append((f"{claim.id}: {error}", error.exit_code))
            return
        self._show(report.content(outcome), report.text(outcome))
        self.errors += [(f"{claim.id}, {reason}", 1) for reason in outcome.failed]

    def _show(self, content: dict[str, Any], text: str) -> None:
        if not self.as_json:
            say(f"\n{text}" if self.told else text)
        self.told.append(content)

    def end(self) -> None:
        """Print the JSON, and end with the sentences of what went wrong."""
        if self.as_json and (self.told or not self.errors):
            print_json({"claims": self.told})
        if self.errors:
            fail("; ".join(sentence for sentence, _ in self.errors), max(code for _, code in self.errors))


def _runs(prepared: Prepared) -> dict[str, Any]:
    runs = [
        {"setting": s, "label": label, "seed": seed, "hash": key, "state": planned.state(key)}
        for s, planned in prepared.plans.items()
        for label, keys in planned.keys.items()
        for seed, key in keys.items()
    ]
    return {"id": prepared.claim.id, "scale": prepared.scale, "needs": prepared.trial.needs, "runs": runs}


def _preview(prepared: Prepared) -> str:
    """Every run with its state; the claim's needs where there is nothing to run."""
    head = f"{prepared.claim.id}, scale {prepared.scale}: "
    if prepared.trial.needs:
        return f"{head}nothing to run; it needs {prepared.trial.needs}"
    runs: Sequence[dict[str, Any]] = _runs(prepared)["runs"]
    folders = ", ".join(dict.fromkeys(str(planned.folder) for planned in prepared.plans.values()))
    states = [run["state"] for run in runs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    names = [f"{run['setting']}, {run['label']}" if run["setting"] else run["label"] for run in runs]
    wide = max(map(len, names))
    lines = [
        f"  {name:<{wide}}  seed {run['seed']}  {run['hash'][:12]}…  {run['state']}"
        for name, run in zip(names, runs, strict=True)
    ]
    return "\n".join([f"{head}{len(runs)} runs in {folders}: {counts}", *lines])
