"""Layers split into a feature extractor that clients share and a cheap domain eraser that is a client's own.

Source: Z. Wang et al., "Federated Learning with Domain Shift Eraser" (CVPR 2025, arXiv 2503.13063). A layer of S inputs
and T channels with batch normalisation becomes, with ratio G,

    core  = dse_bn(dfe_conv(x))                                S -> ceil(T / G), the layer's own kernel and stride
    cheap = dse_conv(core)                                     depthwise 3x3, (G - 1) ceil(T / G) channels, no bias
    y     = dfe_bn([core, cheap] cut to T + dfe_bias)

and keeps the activation that it had. With G = 2 it has about half the parameters. Linear layers are the same with 1x1
kernels. Tensors whose name holds "dse_" are the eraser's, see `is_eraser`.

Decisions: `dfe_conv` has no bias, which `dse_bn` would take away again. It starts from the layer's first filters and
`dfe_bias` from its bias; `dse_conv` is drawn as torch draws it, from a random stream of its own. Convolutions with
groups, layers without batch normalisation, and layers that are used twice stay as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedloom.core.errors import ConfigError
from fedloom.core.seeds import seeded
from fedloom.core.tree import Tensors

MOMENTS = "moments/"  # + name of the block: its statistics in the network's outputs


class Eraser(nn.Module):
    """The block in place of a layer and its norm: [batch, S, H, W] -> [batch, T, H', W'], or [batch, S] -> [batch, T].

    layer: a `Conv2d` without groups, or a `Linear`. norm: its batch normalisation, which becomes `dfe_bn`.
    """

    def __init__(self, layer: nn.Conv2d | nn.Linear, norm: nn.BatchNorm1d | nn.BatchNorm2d, ratio: int = 2):
        super().__init__()
        weight, width = layer.weight.detach(), norm.num_features
        core, self.flat = math.ceil(width / ratio), isinstance(layer, nn.Linear)
        if self.flat:
            weight, side, shape = weight[:, :, None, None], 1, {"kernel_size": 1}
        else:
            names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
            side, shape = 3, {name: getattr(layer, name) for name in names}
        self.dfe_conv = nn.Conv2d(weight.shape[1], core, **shape, bias=False, device="meta")
        self.dfe_conv.weight = nn.Parameter(weight[:core].clone())
        self.dse_bn = nn.BatchNorm2d(core, norm.eps, norm.momentum).to(weight)
        cheap = (ratio - 1) * core
        self.dse_conv = nn.Conv2d(core, cheap, side, padding=side // 2, groups=core, bias=False).to(weight)
        bias = weight.new_zeros(width) if layer.bias is None else layer.bias.detach().clone()
        self.dfe_bias, self.dfe_bn = nn.Parameter(bias), norm
        self.measured = self.recording = False
        self.moments: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Output before the activation; keeps `moments` where they are wanted."""
        core = self.dse_bn(self.dfe_conv(x[:, :, None, None] if self.flat else x))
        both = torch.cat([core, self.dse_conv(core)], 1)[:, : len(self.dfe_bias)]
        both = both + self.dfe_bias[:, None, None].to(both.dtype)
        both = both.flatten(1) if self.flat else both
        out = self.dfe_bn(both)
        if self.measured and self.training:
            found = moments(both)
            if self.recording:  # a recomputation of checkpointed activations is not
                self.moments = found
        return out


def moments(x: Tensor) -> Tensor:
    """Mean and unbiased variance, as batch normalisation tracks them, of every channel of [batch, d, ...]: [2, d]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(0, 1).flatten(1)
    var, mean = torch.var_mean(wide, 1)
    return torch.stack([mean, var])


def erased(module: nn.Module, ratio: int = 2, *, seed: int = 0, measured: bool = False) -> nn.Module:
    """The module itself, with an `Eraser` in place of every layer whose output goes to batch normalisation alone.

    The norms' places are taken by identities. seed: of the new layers' initial values. measured: the outputs of a
    training pass hold "moments/<block>" [2, d] for every block, in the module's order: see `moments`, of the inputs of
    `dfe_bn`. Raises `ConfigError` for a network that cannot be traced, or that has no such layer.
    """
    with seeded(seed, "eraser"):
        pairs = _pairs(module)
        if not pairs:
            raise ConfigError(
                f"{type(module).__name__} has no convolution or linear layer with batch normalisation after it, which "
                "a domain eraser is made of; set model.name to one with batch normalisation, such as resnet8"
            )
        for layer, norm in pairs:
            block = Eraser(module.get_submodule(layer), module.get_submodule(norm), ratio)
            module.set_submodule(layer, block)
            module.set_submodule(norm, nn.Identity())
            block.measured = measured
    if measured:
        module.register_forward_pre_hook(_record)
        module.register_forward_hook(_reported)
    return module


def is_eraser(name: str) -> bool:
    """Whether a parameter or buffer is a domain eraser's, not shared."""
    return any(part.startswith("dse_") for part in name.split("."))


def shared(tree: Tensors) -> dict[str, Tensor]:
    """The part of a tree that is not the erasers'."""
    return {name: tensor for name, tensor in tree.items() if not is_eraser(name)}


def own(tree: Tensors) -> dict[str, Tensor]:
    """The part of a tree that is the erasers'."""
    return {name: tensor for name, tensor in tree.items() if is_eraser(name)}


def shared_moments(buffers: Tensors) -> dict[str, Tensor]:
    """Block -> running mean and variance [2, d] of its `dfe_bn`; empty before any batch has been counted."""
    end = ".dfe_bn.running_mean"
    norms = {name.removesuffix(end): name.removesuffix("running_mean") for name in buffers if name.endswith(end)}
    if not any(bool(buffers[f"{norm}num_batches_tracked"]) for norm in norms.values()):
        return {}
    return {k: torch.stack([buffers[f"{norm}running_{what}"] for what in ("mean", "var")]) for k, norm in norms.items()}


def eraser_norms(module: nn.Module) -> list[nn.Module]:
    """The `dse_bn` of every block."""
    return [block.dse_bn for _, block in _blocks(module)]


def _blocks(module: nn.Module) -> list[tuple[str, Eraser]]:
    return [(name, block) for name, block in module.named_modules() if isinstance(block, Eraser)]


def _record(module: nn.Module, args: Any) -> None:
    for _, block in _blocks(module) if module.training else ():
        block.recording, block.moments = True, None


def _reported(module: nn.Module, args: Any, out: Any) -> Any:
    if not module.training:
        return out
    found = {}
    for name, block in _blocks(module):
        if block.moments is not None:
            found[f"{MOMENTS}{name}"] = block.moments
        block.recording, block.moments = False, None
    return {**({"logits": out} if isinstance(out, Tensor) else out), **found}


def _pairs(module: nn.Module) -> list[tuple[str, str]]:
    """Names of layers and of their norms. Tracing changes `nn.Module` for all threads, which take turns in `seeded`."""
    try:
        nodes = fx.Tracer().trace(module).nodes
    except Exception as error:  # a network's own code can raise anything when it is given symbols
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the layers of {type(module).__name__} cannot be told, as its forward pass cannot be traced "
            f"({type(error).__name__}: {reason}); set model.name to a network without branches, such as resnet8"
        ) from error
    called = {node: module.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"}
    times = Counter(called.values())
    found = []
    for node, norm in called.items():
        source = node.args[0] if node.args else None
        layer = called.get(source) if isinstance(source, fx.Node) else None
        if layer is not None and _fit(layer, norm) and len(source.users) == times[layer] == times[norm] == 1:
            found.append((str(source.target), str(node.target)))
    return found


def _fit(layer: nn.Module, norm: nn.Module) -> bool:
    conv = isinstance(layer, nn.Conv2d) and layer.groups == 1 and isinstance(norm, nn.BatchNorm2d)
    linear = isinstance(layer, nn.Linear) and isinstance(norm, nn.BatchNorm1d)
    return (conv or linear) and norm.track_running_stats
