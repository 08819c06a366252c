"""The README of an app folder: every command from the certificates to the report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import Template

from fedloom import __version__
from fedloom.config import Config
from fedloom.data.catalogue import ALIASES, BUNDLED
from fedloom.engine.flower.hosting import spread
from fedloom.models.clip.named import RANDOM, SMALL, SMALL_FILE

NODES, ROOT = 2, "/srv/data"  # of the example

TEXT = Template("""\
# $project on a Flower federation

A Flower app made by `fedloom deploy`: $about.

The SuperLink's machine runs the rounds, merges what the nodes send, evaluates the result and keeps the run folder.
Every node trains the clients that it hosts, from data on its own disk; no example is ever sent.

The commands are those of Flower 1.40 to 1.42; the [table below](#older-versions-of-flower) says what older ones call
differently. `HOST` is the name or address of the SuperLink's machine as the nodes know it, and `APP` this folder.

## 1. On every machine

Python 3.11 or newer, and the same version of FedLoom ($version) with its extra `flower`; in a checkout of its sources
`pip install '.[flower]'`:

```bash
pip install 'fedloom[flower]'
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
```

$needs

## 2. Certificates and keys

For a test federation; a federation that lasts takes its certificate from the authority of your organisation.

```bash
fedloom deploy certs --out certs --host HOST --nodes $nodes
```

`certs/ca.crt` goes to every machine, `certs/server.pem` and `certs/server.key` to the SuperLink's, and each of
$keys to its node alone.

## 3. The SuperLink

On `HOST`, in the folder below which `runs/` may grow:

```bash
${export}flower-superlink --host 0.0.0.0 --port 8000 \\
  --ssl-ca-certfile certs/ca.crt --ssl-certfile certs/server.pem --ssl-keyfile certs/server.key \\
  --enable-supernode-auth --disable-runtime-dependency-installation
```

Nodes must reach port 8000. On the machine from which you start runs, tell `flwr` where the SuperLink is, in
`~/.flwr/config.toml` (or `$$FLWR_HOME/config.toml`):

```toml
[superlink.fedloom]
address = "HOST:8000"
root-certificates = "/absolute/path/to/certs/ca.crt"
```

Then let the nodes in, each by its public key, before they start:

```bash
$register
```

## 4. The SuperNodes

Together the nodes must host each of the $clients clients, 0 to $last, exactly once. Split over $count:

```bash
$supernodes
```

`clients` takes numbers and ranges, as in `"0-4,7"`. A second node on one machine also needs a port and a home of its
own: put `FLWR_HOME=/some/other/folder` before its command and `--port 9095` behind it.

`flwr supernode list fedloom` shows all of them online.

## 5. Run

```bash
flwr run APP fedloom --stream
```

Any key of `[tool.flwr.app.config]` in `pyproject.toml` can be set for one run:

```bash
flwr run APP fedloom --stream -c 'training.rounds=3 training.optimizer.lr=0.05 run.out="/srv/runs/second"'
```

- Give all of them in one `-c`, or in a TOML file (`-c changes.toml`): of two `-c` that touch one section Flower keeps
  the last alone.
- Texts stand in double quotes. Null, lists and mappings are texts too: `training.clip_norm="yaml:null"`.
- The method, its preset, and the kinds of stream, partition, optimiser and schedule stay as they are, for their options
  go with them. For others make another app: `fedloom deploy RECIPE --method fedprox --out OTHER`.

## 6. Watch, stop, resume

```bash
flwr list fedloom
flwr log RUN_ID fedloom --stream
flwr stop RUN_ID fedloom
```

Trust `flwr list` and the files `DONE` and `FAILED` in the run folder: `flwr run --stream` exits with 0 after a failed
run too.

A run that was broken off, on whichever machine, goes on from its newest checkpoint and ends with the result that it
would have had:

```bash
flwr run APP fedloom --stream -c 'run.out="RUN_FOLDER" run.resume=true'
```

## 7. Results

The run folder lies on the SuperLink's machine: at `run.out` where that was set, else in
`runs/$project/<time>-<id>` below the folder in which `flower-superlink` was started. It is like any other of FedLoom:

```bash
fedloom report RUN_FOLDER
```

## Older versions of Flower

Up to 1.36 `flower-superlink` takes neither `--host` nor `--port` here: it listens on every address, at two ports.

| | 1.28 to 1.32 | 1.36 | 1.40 to 1.42 |
|---|---|---|---|
| ports of `flower-superlink` | 9092, for `flwr` 9093 | the same | 8000 |
| `flower-supernode --superlink` | `HOST:9092` | `HOST:9092` | `HOST:8000` |
| `address` for `flwr` | `HOST:9093` | `HOST:9093` | `HOST:8000` |
| second node on one machine | `--clientappio-api-address 127.0.0.1:9095` | `--port 9095` | `--port 9095` |
| `--disable-runtime-dependency-installation` | not in 1.28: leave it out | the same | the same |
""")


def guide(config: Config, *, project: str, about: str, own: Sequence[str] = ()) -> str:
    """The text for an app of that name. about: what it runs, in a few words. own: modules that are in the folder."""
    clients, rooted = config.partition.clients, _has_root(config)
    blocks = spread(clients, min(NODES, clients))
    keys = [f"node-{k}" for k in range(len(blocks))]
    return TEXT.substitute(
        project=project,
        about=about,
        version=__version__,
        needs=_needs(config, rooted, own),
        nodes=len(blocks),
        count=f"{len(blocks)} nodes" if len(blocks) > 1 else "one node",
        keys=", ".join(f"`certs/{key}`" for key in keys),
        export=f"export FEDLOOM_DATA={ROOT}\n" if rooted else "",
        register="\n".join(f"flwr supernode register certs/{key}.pub fedloom" for key in keys),
        supernodes="\n\n".join(_supernode(key, block, rooted) for key, block in zip(keys, blocks, strict=True)),
        clients=clients,
        last=clients - 1,
    )


def is_published(weights: str) -> bool:
    """Whether weights are the name of published ones (`IMAGENET1K_V1`, `pretrained:openai`) rather than a path."""
    return re.fullmatch(r"\w+|pretrained:[\w.-]+", weights) is not None


def _has_root(config: Config) -> bool:
    """Whether the data set is looked for below a root: neither bundled nor named by its own path."""
    name = config.data.name
    return ALIASES.get(name.lower(), name) not in BUNDLED and name.partition(":")[0] not in ("folder", "parquet")


def _supernode(key: str, clients: str, rooted: bool) -> str:
    root = f'data-root="{ROOT}" ' if rooted else ""
    return (
        "flower-supernode --superlink HOST:8000 --root-certificates certs/ca.crt \\\n"
        f"  --auth-supernode-private-key certs/{key} \\\n"
        f"  --node-config '{root}clients=\"{clients}\"'"
    )


def _needs(config: Config, rooted: bool, own: Sequence[str]) -> str:
    """What the configuration asks of every machine."""
    name, found = config.data.name, []
    if rooted:
        found.append(f"the data set `{name}` below a folder, here `{ROOT}`, as `fedloom run --data-root` takes it")
    elif ":" in name:
        found.append(f"the data set at `{name.partition(':')[2]}`")
    for what, value in (("method", config.method["name"]), ("network", config.model.name)):
        if ":" in value and value.partition(":")[0] not in own:
            found.append(f"the {what} `{value}`, importable: install its package")
    if config.model.name == SMALL and config.model.weights is None:
        found.append(f"the weights of {SMALL} as `{SMALL_FILE}` below its working directory or its source checkout")
    if (weights := config.model.weights) is not None and weights != RANDOM:
        here = f"the published weights `{weights}` of `{config.model.name}`, in its cache or by download"
        found.append(here if is_published(weights) else f"the initial weights at `{weights}`")
    if not found:
        return "Nothing else is needed: the data set comes with scikit-learn."
    return "Every machine also has\n\n" + "\n".join(f"- {line}" for line in found)
