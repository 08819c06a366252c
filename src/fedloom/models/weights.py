"""Reading weights from a local file, strictly: a key that does not fit is an error, never a silent skip."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.core.payload import is_finite

State = dict[str, Tensor]


def read_state(path: str | Path) -> State:
    """Tensors of a `.safetensors` file, or of a torch file that holds a state dict (read without unpickling code)."""
    path = Path(path)
    if not _is_file(path):
        short = str(path)[:200]
        raise ConfigError(f"model.weights: no file '{short}'; give the path of a .safetensors or .pt state dict")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"model.weights: cannot read '{path}': {error.strerror or _first_line(error)}") from error
    except Exception as error:  # whatever the two formats raise; torch would advise to unpickle the file
        raise ConfigError(
            f"model.weights: cannot read '{path}', which is damaged or no file of weights ({type(error).__name__}); "
            "give a .safetensors file, or one that torch.save wrote of a state dict"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ConfigError(f"model.weights: '{path}' holds no state dict of tensors")
    return dict(state)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long a name, a null byte
        return False


def load_weights(
    module: nn.Module,
    path: str | Path,
    *,
    ignore: Collection[str] = (),
    convert: Callable[[State, nn.Module], State] | None = None,
) -> None:
    """Load a file into a backbone.

    A file of a whole `Classifier` (keys "backbone.*", "head.*") gives its backbone. ignore: prefixes of the
    original classifier, which a feature extractor lacks. convert: maps a published layout to the module's own.
    Raises `ConfigError` naming the keys that are missing, left over or of another shape.
    """
    state = read_state(path)
    if state and all(key.startswith(("backbone.", "head.")) for key in state):
        state = {k.removeprefix("backbone."): t for k, t in state.items() if k.startswith("backbone.")}
    if convert is not None:
        state = convert(state, module)
    own = module.state_dict()
    state = {k: t for k, t in state.items() if k in own or not k.startswith(tuple(f"{p}." for p in ignore))}
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or extra:
        raise ConfigError(
            f"model.weights: '{path}' does not fit {type(module).__name__}: missing {_some(missing)}, "
            f"unknown {_some(extra)}"
        )
    for key, tensor in state.items():
        if tensor.shape != own[key].shape:
            raise ConfigError(
                f"model.weights: '{key}' of '{path}' has shape {tuple(tensor.shape)}, "
                f"the network needs {tuple(own[key].shape)}"
            )
    check_values(state, own, path)
    module.load_state_dict(state, strict=True)


def check_values(state: Mapping[str, Tensor], own: Mapping[str, Tensor], path: str | Path) -> None:
    """Raise `ConfigError` for tensors that a network would take in silence and compute nonsense with.

    state: what a file holds. own: the network's, whose floating-point tensors need finite floating-point values.
    """
    floats = {key: tensor for key, tensor in state.items() if key in own and own[key].is_floating_point()}
    if whole := sorted(key for key, tensor in floats.items() if not tensor.is_floating_point()):
        raise ConfigError(
            f"model.weights: '{path}' holds whole numbers ({str(floats[whole[0]].dtype).removeprefix('torch.')}) in "
            f"{_some(whole)}, where the network has fractions; give weights that are not quantised"
        )
    if broken := sorted(key for key, tensor in floats.items() if not is_finite(tensor)):
        raise ConfigError(
            f"model.weights: '{path}' holds values that are not finite in {_some(broken)}; the training that wrote it "
            "diverged or the file is damaged: give another"
        )


def _some(keys: list[str]) -> str:
    shown = ", ".join(f"'{key}'" for key in keys[:3])
    return (f"{shown} and {len(keys) - 3} more" if len(keys) > 3 else shown) or "none"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
