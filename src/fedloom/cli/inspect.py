"""`show-data`, and the preview of `run --dry-run`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.application import Json, Recipe, Root, Seed, Set, guarded, layers, print_json
from fedloom.terminal import say

if TYPE_CHECKING:
    from fedloom.build import Built

SHOWN = 20  # clients printed in a table; the picture and --json have more


@guarded
def show_data(
    recipe: Recipe = "quickstart",
    sets: Set = None,
    seed: Seed = None,
    data_root: Root = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Picture to write (PNG).")] = None,
    as_json: Json = False,
) -> None:
    """Show who holds which classes, and when: a table and a picture."""
    from fedloom.build import load_data, plan
    from fedloom.config import resolve, resolve_source
    from fedloom.core.errors import ConfigError

    name, base = resolve_source(recipe)
    config = resolve(base, layers(sets=sets, seed=seed, root=data_root))
    found = plan(config, load_data(config))
    picture = out if out is not None else Path(f"{name}-data.png")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        found.draw(picture)
    except OSError as error:
        raise ConfigError(f"--out '{picture}' cannot be written: {error.strerror}") from error
    if as_json:
        print_json({**found.describe(), "picture": str(picture)})
        return
    for line in holdings(found.describe()):
        say(line)
    for note in found.notes:
        say(f"note: {note}", err=True)
    say(f"picture: {picture}")


def preview(built: Built, as_json: bool) -> None:
    """The resolved configuration, who holds what, parameters and bytes per round."""
    found = {
        "config": built.config.as_dict(),
        "config_hash": built.hash,
        "workers": built.options.workers,
        "data": built.experiment.plan.describe(),
        **_costs(built),
    }
    if as_json:
        print_json(found)
        return
    import yaml

    say(yaml.safe_dump(found["config"], sort_keys=False, allow_unicode=True).rstrip())
    say("")
    for line in holdings(found["data"]):
        say(line)
    for note in built.experiment.plan.notes:
        say(f"note: {note}", err=True)
    count = found["trained_parameters"]
    trained = "" if count == found["parameters"] else f", {count:,} of them trained"
    say(
        f"\n{found['parameters']:,} parameters{trained}; "
        f"{_many(found['clients_per_round'], 'client')} a round, who are sent "
        f"{found['bytes_down_first_round']:,} bytes a round in the first stage, "
        f"{found['bytes_down_last_round']:,} in the last; "
        f"workers: {found['workers']}; configuration {found['config_hash'][:12]}"
    )


def _costs(built: Built) -> dict[str, Any]:
    """Counted on the initial server state; uploads depend on the clients' work and are measured by a run."""
    from fedloom.core.payload import nbytes
    from fedloom.evaluate.cost import parameters

    experiment = built.experiment
    net = experiment.net()
    first = experiment.context(net, 0)
    server = experiment.method.init_server(first)
    stages = (0, experiment.plan.num_stages - 1)
    sizes, cohorts = [], []
    for stage in stages:
        ctx = experiment.context(net, stage, round=0)
        cohorts.append(len(experiment.draw(stage, 0, "cohort")))
        one = nbytes(experiment.method.send(server, None, ctx), experiment.method.class_rows(ctx), ctx.stage.seen)
        sizes.append(one * cohorts[-1])
    return {
        "parameters": parameters(built.module),
        "trained_parameters": sum(p.numel() for p in built.module.parameters() if p.requires_grad),
        "clients_per_round": cohorts[0],
        "bytes_down_first_round": sizes[0],
        "bytes_down_last_round": sizes[1],
    }


def _examples(described: Mapping[str, Any]) -> str:
    tests = sum(described["test_examples_per_task"])
    return f"{described['train_examples']:,} training and {tests:,} test examples"


def holdings(described: Mapping[str, Any]) -> list[str]:
    """A table of examples per client and stage, from the plan's description."""
    stages = described["stages"]
    clients = [str(c) for c in described["clients_listed"]][:SHOWN]
    tasks = ", ".join(f"task {k}: {_task(described, k)}" for k in range(len(described["tasks"][:12])))
    size = f"{_many(described['clients'], 'client')}, {_many(len(stages), 'stage')}, {_examples(described)}"
    lines = [f"{described['data']}: {size}; {tasks}"]
    wide = 21 if "domain_names" in described else 14
    lines.append("client  " + "  ".join(f"{'stage ' + str(s['stage']):>{wide}}" for s in stages[:10]))
    for client in clients:
        cells = [_cell(s["clients"].get(client)) for s in stages[:10]]
        lines.append(f"{client:>6}  " + "  ".join(f"{cell:>{wide}}" for cell in cells))
    hidden = described["clients"] - len(clients)
    if hidden > 0:
        lines.append(f"   ...  and {hidden} more client{'s' * (hidden > 1)}")
    if len(stages) > 10:
        lines.append(f"   ...  and {len(stages) - 10} more stage{'s' * (len(stages) > 11)}")
    return lines


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _cell(held: Mapping[str, Any] | None) -> str:
    if not held or not held["examples"]:
        return "-"
    domains = f", {len(held['domains'])} dom" if "domains" in held else ""
    return f"{held['examples']} in {len(held['classes'])} cl{domains}"


def _task(described: Mapping[str, Any], task: int) -> str:
    """What a task brings: its classes, or its domain where domains arrive one after another."""
    own, names = described.get("task_domains", [[]])[task:], described.get("domain_names", [])
    if own and len(own[0]) < len(names):
        return ", ".join(names[domain] for domain in own[0])
    return _span(described["tasks"][task])


def _span(task: list[int]) -> str:
    if len(task) > 4 and task == list(range(task[0], task[-1] + 1)):
        return f"{task[0]}..{task[-1]}"
    return " ".join(map(str, task[:6])) + (f" (+{len(task) - 6})" if len(task) > 6 else "")
