"""The served model as an ONNX graph that needs neither FedLoom nor torch."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core import ConfigError, Context, Method
from fedloom.served import Served, open_view

TOLERANCE = 1e-3  # largest difference of finite scores between torch and onnxruntime


@dataclass(frozen=True)
class _Bound(Context):
    """A context around the network that is served, with its values: a graph cannot record copies into parameters."""

    def bind(self, params: Any, buffers: Any = None) -> Any:
        return dict(self.net.module.named_parameters())

    def rebuild(self, spec: Any) -> _Bound:
        return self


class _Graph(nn.Module):
    """Stored inputs as float32 [batch, ...] -> scores [batch, classes]; normalisation is inside."""

    def __init__(self, served: Served):
        super().__init__()
        context = served.deployed()
        self.module = context.net.module
        self._served, self._state = served, served.client_state()
        given = {f.name: getattr(context, f.name) for f in fields(context) if f.init}
        self._context = _Bound(**given)
        scale = 255.0 if served.meta["stored"] == "uint8" else 1.0
        mean, std = (torch.tensor(served.meta[k] or [d]) for k, d in (("mean", 0.0), ("std", 1.0)))
        shape = (1, -1, 1, 1) if len(served.meta["input_shape"]) == 3 else (1,) * (len(served.meta["input_shape"]) + 1)
        self.register_buffer("shift", (scale * mean).view(shape))
        self.register_buffer("spread", (scale * std).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.shift) / self.spread
        method = self._served.method
        if type(method).predict is Method.predict:
            return self._context.scores(x)
        return method.predict(self._served.view, self._state, x, self._context)


def export_onnx(folder: Path, out: Path, client: int | None = None) -> tuple[Path, str]:
    """Write the global model, or a client's own, and compare it with torch: the path and what the check found.

    The graph's input `x` is the stored input as float32 (8-bit images as 0..255), its output `scores`.
    Raises `ConfigError` when the extra is missing, the method cannot be exported, or the results differ.
    """
    _need("onnx", "onnxscript")
    served = open_view(folder, client)
    if served.text is not None:
        raise ConfigError(
            "the model reads texts, and only those of images and vectors are exported to ONNX; use --format safetensors"
        )
    served.context.net.forward = replace(served.context.net.forward, precision="fp32")  # the graph has no autocast
    graph = _Graph(served).eval()
    sample = torch.zeros(2, *served.meta["input_shape"])
    with torch.no_grad():
        graph(sample)  # what a network computes once, such as texts of classes, is a constant of the graph
    try:
        with _silent():
            program = torch.onnx.export(
                graph,
                (sample,),
                dynamo=True,
                input_names=["x"],
                output_names=["scores"],
                dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
                verbose=False,
            )
            out.parent.mkdir(parents=True, exist_ok=True)
            program.save(str(out), external_data=False)
    except OSError as error:
        raise ConfigError(f"cannot write '{out}' ({error}); name another file with --out") from error
    except Exception as error:  # the exporter raises many kinds for what it cannot express
        reason = str(error.__cause__ or error).strip().split("\n")[0].split(" See the stack trace")[0]
        raise ConfigError(f"this method cannot be exported to ONNX ({reason}); use --format safetensors") from error
    try:
        return out, _check(graph, served, out)
    except ConfigError:
        out.unlink(missing_ok=True)  # nobody shall take a wrong graph for the model
        raise


def _check(graph: nn.Module, served: Served, path: Path) -> str:
    try:
        import onnxruntime
    except ImportError:
        return "not compared with torch: onnxruntime is not installed (extra 'onnx')"
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(3, *served.meta["input_shape"], generator=rng) * (255 if served.meta["stored"] == "uint8" else 1)
    with torch.no_grad():
        want = graph(x)
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        got = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
    except Exception as error:  # onnxruntime has errors of its own, which share no class
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"onnxruntime cannot run the exported graph ({reason}); use --format safetensors") from error
    finite = want.isfinite()
    worst = float((got[finite] - want[finite]).abs().max())
    if not torch.equal(finite, got.isfinite()) or worst > TOLERANCE:
        raise ConfigError(f"the exported graph differs from torch by {worst:.2g}; use --format safetensors")
    return f"onnxruntime agrees with torch to {worst:.1g}"


def _need(*packages: str) -> None:
    import importlib.util

    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        raise ConfigError(f"--format onnx needs {needed}; install the extra: pip install 'fedloom[onnx]'")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The exporter talks on stdout and warns about its own internals; neither is for our users."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
