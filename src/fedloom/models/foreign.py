"""Backbones of torchvision and timm, without their classifiers. Nothing is downloaded unless `weights` asks for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fedloom.core.errors import ConfigError, closest, unknown
from fedloom.models.channels import Channels, Draft
from fedloom.models.checkpointing import nested_blocks, set_checkpointing
from fedloom.models.weights import load_weights

log = logging.getLogger(__name__)


class Foreign(nn.Module):
    """A network `body` from another library: [batch, C, H, W] -> [batch, num_features]."""

    memory_format = "contiguous"

    def __init__(self, body: nn.Module, num_features: int):
        super().__init__()
        self.body, self.num_features = body, num_features

    def forward(self, x: Tensor) -> Tensor:
        """Features [batch, num_features]."""
        return self.body(x).flatten(1)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass."""
        set_checkpointing(nested_blocks(self.body), enable)

    def channel_groups(self) -> Channels | None:
        """The table of a torchvision ResNet; None for other networks, which are traced."""
        is_resnet = type(self.body).__module__ == "torchvision.models.resnet"
        return _resnet_groups(self.body).prefixed("body") if is_resnet else None


def _resnet_groups(body: nn.Module) -> Channels:
    draft, stream = Draft(body), "conv1"
    draft.layer("conv1", reads=None, writes=stream)
    draft.norm("bn1", stream)
    draft.tap(stream, "maxpool", "input")
    for name, block in body.named_modules():
        if type(block).__module__ == type(body).__module__ and name:
            convs = [n for n, _ in block.named_children() if n.startswith("conv")]
            layers = [(conv, conv.replace("conv", "bn")) for conv in convs]
            shortcut = None if block.downsample is None else "downsample"
            stream = draft.residual_block(name, layers, shortcut, stream)
    return draft.table()


def torchvision_backbone(
    name: str, *, input_shape: Sequence[int], weights: str | None, options: Mapping[str, Any]
) -> Foreign:
    """A torchvision classifier whose last linear layer is removed.

    weights: None, the path of a local state dict, or a name of torchvision's weights such as "IMAGENET1K_V1",
    which is downloaded (a log line says so). Raises `ConfigError` for an unknown name, option or weight.
    """
    import torchvision.models as zoo

    known = zoo.list_models(module=zoo)
    if name not in known:
        raise ConfigError(unknown("torchvision model", name, known))
    if input_shape[0] != 3:
        raise ConfigError(f"torchvision/{name} needs images of 3 channels, got input_shape {tuple(input_shape)}")
    try:
        body = zoo.get_model(name, weights=None, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.options of torchvision/{name}: {error}") from error
    if not any(isinstance(module, nn.Linear) for module in body.modules()):
        raise ConfigError(f"torchvision/{name} has no linear layer as its classifier to replace; take another network")
    if getattr(body, "aux_logits", False):
        raise ConfigError(f"torchvision/{name} has auxiliary classifiers; set model.options.aux_logits to false")
    published = {w.name: w for w in zoo.get_model_weights(name)}
    if weights in published:
        _download(body, published[weights], f"torchvision/{name}")
    head, width = _cut_head(body)
    if weights is not None and weights not in published:
        load_weights(body, weights, ignore=[head])
    return Foreign(body, width)


def _download(body: nn.Module, weights: Any, name: str) -> None:
    log.warning("downloading the weights %s of %s from %s", weights.name, name, weights.url)
    try:
        body.load_state_dict(weights.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"model.weights: cannot download '{weights.name}' of {name} ({error}); give the path of a local file"
        ) from error


def _cut_head(body: nn.Module) -> tuple[str, int]:
    """Replace the last linear layer, which is the classifier, by the identity; return its name and width."""
    head = [name for name, module in body.named_modules() if isinstance(module, nn.Linear)][-1]
    width = body.get_submodule(head).in_features
    parent, _, leaf = head.rpartition(".")
    setattr(body.get_submodule(parent), leaf, nn.Identity())
    return head, width


def timm_backbone(name: str, *, input_shape: Sequence[int], weights: str | None, options: Mapping[str, Any]) -> Foreign:
    """A timm network without classifier, with the input channels (and, where it is fixed, the image size) of the data.

    weights: None, "pretrained" for those that timm publishes under this name (on the Hugging Face hub, or in its
    cache), or the path of a local state dict in timm's layout; position embeddings of another image size are resampled
    where timm can. options: further arguments of `timm.create_model`, such as `patch_size`.
    Raises `ConfigError` when timm is missing, for an unknown name, option or weight, and for published weights that
    cannot be had.
    """
    try:
        import timm
    except ImportError as error:
        raise ConfigError(f"model.name 'timm/{name}' needs timm: pip install 'fedloom[vision]'") from error

    if not timm.is_model(name):
        hint = closest(name, timm.list_models())
        raise ConfigError(f"unknown timm model '{name}'.{hint} timm.list_models() names all of them.")
    reserved = sorted({"pretrained", "num_classes", "in_chans", "checkpoint_path"} & options.keys())
    if reserved:
        raise ConfigError(f"model.options of timm/{name}: {reserved} are set by the library; use weights for a file")
    config = timm.get_pretrained_cfg(name)
    sized = {"img_size": tuple(input_shape[1:])} if config is not None and config.fixed_input_size else {}
    given = {"num_classes": 0, "in_chans": input_shape[0], **sized, **options}
    try:
        body = _published(name, given) if weights == "pretrained" else timm.create_model(name, **given)
    except ConfigError:
        raise
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"model.options of timm/{name}: {error}") from error
    if weights not in (None, "pretrained"):
        heads = config.classifier if config is not None else ()
        convert = getattr(sys.modules[type(body).__module__], "checkpoint_filter_fn", None)
        load_weights(body, weights, ignore=[heads] if isinstance(heads, str) else list(heads or ()), convert=convert)
    return Foreign(body, getattr(body, "head_hidden_size", None) or body.num_features)


def _published(name: str, given: Mapping[str, Any]) -> nn.Module:
    """The network with the weights that timm publishes; every process of a run gets them from the hub's cache."""
    import timm

    log.warning("taking the published weights of timm/%s from the Hugging Face hub or its cache", name)
    try:
        return timm.create_model(name, pretrained=True, **given)
    except Exception as error:  # of the network, the hub's client and timm, each with errors of its own
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.weights is pretrained, but those of timm/{name} cannot be had ({type(error).__name__}: {reason}); "
            "give the path of a local state dict, or fetch them once where there is a network"
        ) from error
