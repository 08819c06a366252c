"""The app folder that `flwr run` takes: two shims, the configuration in pyproject.toml, and a README of commands."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from fedloom.build import method as made
from fedloom.config import Config
from fedloom.config.words import shorten, shown
from fedloom.core.errors import ConfigError
from fedloom.deploy.flatten import Deployment, Scalar, run_config
from fedloom.deploy.fresh import fresh_folder
from fedloom.deploy.guide import guide, is_published

LONGEST_NAME = 32  # characters that Flower allows for the name of an app
PUBLISHER = "fedloom"

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = {project}
version = "1.0.0"
description = {about}
license = "Apache-2.0"
dependencies = ["fedloom[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "{publisher}"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# Every key can be set for one run: flwr run . fedloom -c 'training.rounds=3'
# Null, lists and mappings are texts: yaml:null, yaml:[0.9, 0.999]
[tool.flwr.app.config]
{config}
"""

SHIM = '''\
"""{about}"""

from fedloom.deploy import {side}_app

app = {side}_app()
'''

IGNORED = """\
# What must not travel to the nodes with the app.
runs/
certs/
*.fab
"""


def write_app(config: Config, out: Path, *, name: str) -> Path:
    """Write a Flower app folder that runs a configuration on a deployed federation; returns its absolute path.

    name: a Python identifier in lower case of at most 32 characters, see `app_name`. The folder is complete or absent.
    The nodes name their data themselves: `data.root` is not written. A method or network of the user's own that is one
    file beside them goes into the folder, and with it to every node.
    Raises `ConfigError` for a name or folder that cannot be used and for settings that only work on one machine.
    """
    if name != app_name(name):
        raise ConfigError(
            f"name of the app is {shown(name)}, which is none for Python and Flower; try {app_name(name)}"
        )
    config = deployed(config)
    project, package = name.replace("_", "-"), package_name(name)
    method, data, clients = config.method["name"], config.data.name, config.partition.clients
    about = f"{method} on {data} with {clients} client{'s' * (clients != 1)}"
    own = own_modules(config)
    files = {
        "pyproject.toml": PYPROJECT.format(
            project=_toml(project),
            package=package,
            publisher=PUBLISHER,
            about=_toml(about),
            config=_table(run_config(config, Deployment(name=project))),
        ),
        "README.md": guide(config, project=project, about=about, own=[path.stem for path in own]),
        ".gitignore": IGNORED,
        f"{package}/__init__.py": f'"""The app {project}."""\n',
        f"{package}/server_app.py": SHIM.format(about="What the SuperLink's machine runs.", side="server"),
        f"{package}/client_app.py": SHIM.format(about="What every node runs.", side="client"),
    }
    with fresh_folder(out) as folder:
        (folder / package).mkdir()
        for path, text in files.items():
            (folder / path).write_bytes(text.encode())
        for module in own:
            shutil.copyfile(module, folder / module.name)
    return out.absolute()


def own_modules(config: Config) -> list[Path]:
    """Files of the user's own modules that the method and the network come from; none for what is installed."""
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    found = []
    for value in (config.method["name"], config.model.name):
        module, colon, _ = value.partition(":")
        spec = importlib.util.find_spec(module) if colon and module.isidentifier() else None
        path = Path(spec.origin) if spec is not None and spec.origin and not spec.submodule_search_locations else None
        if path is not None and path.suffix == ".py" and not any(path.is_relative_to(root) for root in installed):
            found.append(path)
    return sorted(set(found))


def app_name(text: str) -> str:
    """The closest name that Python and Flower both take: `cifar100-fcil-small` -> `cifar100_fcil_small`."""
    words = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    if not words[:1].isalpha() or keyword.iskeyword(words):
        words = f"app_{words}".rstrip("_")
    return words[:LONGEST_NAME].rstrip("_")


def package_name(name: str) -> str:
    """The package of the shims. Its ending keeps it from standing in for a library of the same name."""
    return f"{name}_app"


def deployed(config: Config) -> Config:
    """The configuration as an app carries it; `ConfigError` for what cannot leave this machine."""
    _refuse_objects(config)
    _refuse_local_paths(config)
    runtime = config.engine.runtime
    if runtime not in (None, "deployment"):
        raise ConfigError(f"engine.runtime is {runtime}, which runs on one machine; leave it out for an app")
    engine = config.engine.model_copy(update={"name": "flower", "runtime": "deployment", "workers": 1})
    data = config.data.model_copy(update={"root": None})
    config = _with_words(config.model_copy(update={"engine": engine, "data": data}))
    made(config)  # refuses a method that no deployed federation can give the data that it needs
    return config


def _with_words(config: Config) -> Config:
    """The configuration with the words of a file of class words, which nodes need not have."""
    from fedloom.data.words import read_words

    given = config.model.options.get("class_words")
    if not isinstance(given, str):
        return config
    options = {**config.model.options, "class_words": read_words(given)}
    return config.model_copy(update={"model": config.model.model_copy(update={"options": options})})


def _refuse_objects(config: Config) -> None:
    data, model, method = config.data.name, config.model.name, config.method["name"]
    if data.startswith("stored:"):
        raise ConfigError(
            f"data.name is {shorten(data)}, arrays that were passed from Python and do not travel; "
            "write them to every node as a folder or as parquet, and name that as folder:PATH or parquet:PATH"
        )
    if model.startswith("object:"):
        raise ConfigError(
            f"model.name is {shorten(model)}, a network that was passed from Python; "
            "name a factory that every node can import, as package.module:factory"
        )
    for key, value in (("method.name", method), ("model.name", model)):
        if value.startswith("__main__:"):
            raise ConfigError(f"{key} is {shorten(value)}, which nodes cannot import; move it to a module of its own")


def _refuse_local_paths(config: Config) -> None:
    """A path that begins nowhere means another folder in every process."""
    scheme, _, path = config.data.name.partition(":")
    if scheme in ("folder", "parquet") and not _is_absolute(path):
        raise ConfigError(
            f"data.name is {shorten(config.data.name)}, a path that nodes cannot follow; give the absolute path "
            f"under which every node has the data, such as {scheme}:/srv/data"
        )
    weights = config.model.weights
    if weights is not None and not is_published(weights) and not _is_absolute(weights):
        raise ConfigError(
            f"model.weights is {shorten(weights)}, a path that nodes cannot follow; "
            "give the absolute path under which every machine has the file"
        )


def _is_absolute(path: str) -> bool:
    return path.startswith("~") or Path(path).is_absolute()


def _table(flat: Mapping[str, Scalar]) -> str:
    """Lines of TOML, with an empty line between sections."""
    lines: list[str] = []
    last = None
    for key, value in flat.items():
        section = key.partition(".")[0] if "." in key else ""
        if last is not None and section != last:
            lines.append("")
        lines.append(f"{key} = {_toml(value)}")
        last = section
    return "\n".join(lines)


def _toml(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if re.fullmatch(r"[^'\x00-\x1f\x7f]*", value) and ('"' in value or "\\" in value):
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
