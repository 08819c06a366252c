"""The registry of methods: a module of this package is a method when it holds a function of its own name.

Methods outside the package load by `package.module:attribute`, the current directory included.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.core.errors import ConfigError, closest, origin, unknown

HERE = Path(__file__).parent


def names() -> list[str]:
    """Names of the methods of this package, sorted."""
    return [path.stem for path in sorted(HERE.glob("*.py")) if _defines(path)]


def summaries() -> list[tuple[str, str]]:
    """(name, first line of the module's docstring), read without importing the methods."""
    found = []
    for name in names():
        doc = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
        found.append((name, doc.split("\n", 1)[0]))
    return found


def documentation(name: str) -> str:
    """The docstring of a method's module, or of the factory where the module has none."""
    factory = load(name)
    return inspect.getdoc(sys.modules[factory.__module__]) or inspect.getdoc(factory) or ""


def load(name: str) -> Callable[..., Any]:
    """The factory of a method: a function, or the dataclass itself, called with options as keywords.

    Raises `ConfigError` with the closest match for an unknown name, and naming module and attribute for a
    `module:attribute` that cannot be loaded.
    """
    if ":" in name:
        return load_attribute(name, "method.name")
    path = HERE / f"{name}.py"
    if "@" in name:
        plain, _, preset = name.partition("@")
        raise ConfigError(
            f"method '{name}': a preset is named so by `compare`, `sweep` and `ablate`; elsewhere take method {plain} "
            f"and --set method.preset={preset}"
        )
    if not (name.isidentifier() and path.is_file() and _defines(path)):
        raise ConfigError(
            f"{unknown('method', name, names())} A method of your own is named 'package.module:attribute'."
        )
    return getattr(importlib.import_module(f"fedloom.methods.{name}"), name)


def presets(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Option values of every preset of a method (`PRESETS` of its module); `paper` always exists."""
    return {"paper": {}, **_declared(name, "PRESETS")}


def ablations(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Option values of every switch of a method (`ABLATIONS` of its module): what takes a part of it away."""
    return _declared(name, "ABLATIONS")


def _declared(name: str, attribute: str) -> Mapping[str, Mapping[str, Any]]:
    module = sys.modules[load(name).__module__] if ":" not in name else _module(name.partition(":")[0], "method.name")
    found = getattr(module, attribute, {})
    if not isinstance(found, Mapping) or not all(isinstance(options, Mapping) for options in found.values()):
        raise ConfigError(f"method.name '{name}': {attribute} of its module must map names to mappings of options")
    return found


def load_attribute(name: str, field: str) -> Any:
    """Import `package.module:attribute`; errors name the configuration field."""
    module_name, _, attribute = name.partition(":")
    module = _module(module_name, field)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            near = closest(part, [known for known in vars(target) if not known.startswith("_")])
            raise ConfigError(f"{field} '{name}': module '{module_name}' has no attribute '{attribute}'.{near}")
        target = getattr(target, part)
    return target


def _module(module_name: str, field: str) -> Any:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a user's module raises while it is imported becomes one sentence
        raise ConfigError(
            f"{field}: module '{module_name}' cannot be imported ({_cause(error, module_name)}"
        ) from error


def _cause(error: BaseException, module_name: str) -> str:
    """What went wrong in an import, the bracket's end, and the mend that fits."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if not all(part.isidentifier() for part in module_name.split(".")):
        return f"'{module_name[:60]}' is no name of a module); write package.module:attribute"
    if isinstance(error, SyntaxError):
        return (
            f"{type(error).__name__}: {error.msg}, {Path(error.filename or '').name}:{error.lineno}); correct that line"
        )
    if not isinstance(error, ModuleNotFoundError):
        return f"{reason}, {origin(error)}); correct that line"
    missing = error.name or ""
    if module_name == missing or module_name.startswith(f"{missing}."):
        return f"{reason}); run from its folder or install it"
    return f"{reason}, {origin(error)}); install '{missing}' or correct the import"


def _defines(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == path.stem for node in tree.body)
