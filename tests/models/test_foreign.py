"""Backbones of torchvision and timm at random initial values."""

from __future__ import annotations

import builtins
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from fedloom.core import ConfigError, Forward, Net
from fedloom.models import NetworkSpec, backbone


@pytest.fixture(scope="module")
def timm():
    return pytest.importorskip("timm")


def test_torchvision_resnet18() -> None:
    module = backbone("torchvision/resnet18", input_shape=(3, 64, 64))
    assert module.num_features == 512 and sum(p.numel() for p in module.parameters()) == 11_176_512
    assert module(torch.randn(2, 3, 64, 64)).shape == (2, 512)


def test_other_torchvision_families() -> None:
    small = backbone("torchvision/mobilenet_v3_small", input_shape=(3, 32, 32)).eval()
    assert small(torch.randn(1, 3, 32, 32)).shape == (1, small.num_features)
    with pytest.raises(ConfigError, match="needs images of 3 channels, got input_shape"):
        backbone("torchvision/resnet18", input_shape=(1, 64, 64))
    with pytest.raises(ConfigError, match=r"model.options of torchvision/resnet18: .*widht"):
        backbone("torchvision/resnet18", input_shape=(3, 64, 64), widht=3)
    with pytest.raises(ConfigError, match="Did you mean 'resnet18'"):
        backbone("torchvision/resnet180", input_shape=(3, 64, 64))
    with pytest.raises(ConfigError, match="squeezenet1_1 has no linear layer as its classifier"):
        backbone("torchvision/squeezenet1_1", input_shape=(3, 64, 64))
    with pytest.raises(ConfigError, match=r"set model.options.aux_logits to false"):
        backbone("torchvision/googlenet", input_shape=(3, 64, 64), init_weights=False)


def test_torchvision_weights_from_a_local_file(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    source = resnet18(weights=None)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    spec = NetworkSpec("torchvision/resnet18", 4, (3, 64, 64), weights=str(tmp_path / "weights.safetensors"))
    loaded = spec.backbone()
    assert torch.equal(loaded.body.layer4[1].conv2.weight, source.layer4[1].conv2.weight)


def test_published_torchvision_weights_are_announced(monkeypatch, caplog) -> None:
    from torchvision.models import ResNet18_Weights, resnet18

    state = resnet18(weights=None).state_dict()
    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", lambda self, **_: state)
    with caplog.at_level(logging.WARNING):
        loaded = backbone("torchvision/resnet18", input_shape=(3, 64, 64), weights="IMAGENET1K_V1")
    assert torch.equal(loaded.body.conv1.weight, state["conv1.weight"])
    assert "downloading the weights IMAGENET1K_V1 of torchvision/resnet18" in caplog.text

    def offline(self, **_):
        raise OSError("no route")

    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", offline)
    with pytest.raises(ConfigError, match=r"cannot download 'IMAGENET1K_V1'.*no route.*local file"):
        backbone("torchvision/resnet18", input_shape=(3, 64, 64), weights="IMAGENET1K_V1")
    with pytest.raises(ConfigError, match="no file 'IMAGENET1K_V9'"):
        backbone("torchvision/resnet18", input_shape=(3, 64, 64), weights="IMAGENET1K_V9")


TINY = {"timm/resnet10t": {}, "timm/vit_tiny_patch16_224": {"patch_size": 8, "depth": 2, "embed_dim": 24}}


@pytest.mark.parametrize("name", TINY)
def test_timm_backbones_run_recompute_and_bind(timm, name: str) -> None:
    spec = NetworkSpec(name, 3, (1, 32, 32), options=TINY[name])
    plain = Net(spec.classifier)
    recomputing = Net(spec.classifier, Forward(grad_checkpointing=True))
    x, y = torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
    state = plain.fresh()
    assert bool(state["buffers"]) == (name == "timm/resnet10t")
    for net in (plain, recomputing):
        net.bind(state["params"], state["buffers"])
        F.cross_entropy(net(x)["logits"], y).backward()
    for a, b in zip(plain.module.parameters(), recomputing.module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for a, b in zip(plain.take()[1].values(), recomputing.take()[1].values(), strict=True):
        assert torch.equal(a, b)
    assert any("forward" in m.__dict__ for m in recomputing.module.modules())


def test_timm_weights_from_a_local_file(timm, tmp_path: Path) -> None:
    options = TINY["timm/vit_tiny_patch16_224"]
    source = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=32, **options)
    save_file(source.state_dict(), tmp_path / "vit.safetensors")
    for size in (32, 48):  # another image size: position embeddings are resampled
        spec = NetworkSpec(
            "timm/vit_tiny_patch16_224", 3, (3, size, size), weights=str(tmp_path / "vit.safetensors"), options=options
        )
        body = spec.backbone().body
        assert torch.equal(body.blocks[1].mlp.fc1.weight, source.blocks[1].mlp.fc1.weight)
    broken = {k: t for k, t in source.state_dict().items() if k != "blocks.0.norm1.weight"}
    save_file(broken, tmp_path / "broken.safetensors")
    with pytest.raises(ConfigError, match=r"missing 'blocks\.0\.norm1\.weight', unknown none"):
        backbone(
            "timm/vit_tiny_patch16_224",
            input_shape=(3, 32, 32),
            weights=str(tmp_path / "broken.safetensors"),
            **options,
        )


def test_published_timm_weights_come_from_the_hubs_cache(timm, tmp_path: Path, monkeypatch) -> None:
    """A cache as the hub's client lays it out stands for the hub."""
    import huggingface_hub.constants

    name = "test_vit.r160_in1k"
    source = timm.create_model(name, num_classes=1000)
    snapshot = tmp_path / f"models--timm--{name}" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / f"models--timm--{name}" / "refs").mkdir()
    (tmp_path / f"models--timm--{name}" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    spec = NetworkSpec(f"timm/{name}", 3, (3, 64, 64), weights="pretrained")
    with pytest.raises(ConfigError, match=r"model.weights is pretrained, but those of timm/test_vit.* cannot be had"):
        spec.backbone()
    save_file(source.state_dict(), snapshot / "model.safetensors")
    body = spec.backbone().body
    assert torch.equal(body.blocks[0].mlp.fc1.weight, source.blocks[0].mlp.fc1.weight)
    assert body.pos_embed.shape != source.pos_embed.shape, "position embeddings are resampled to the images"


def test_timm_refusals(timm) -> None:
    with pytest.raises(ConfigError, match="unknown timm model 'resnet10'"):
        backbone("timm/resnet10", input_shape=(3, 32, 32))
    with pytest.raises(ConfigError, match=r"\['pretrained'\] are set by the library"):
        backbone("timm/resnet10t", input_shape=(3, 32, 32), pretrained=True)
    with pytest.raises(ConfigError, match=r"model.options of timm/resnet10t: .*foo"):
        backbone("timm/resnet10t", input_shape=(3, 32, 32), foo=1)


def test_missing_timm_names_the_extra(monkeypatch) -> None:
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name == "timm":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"'timm/resnet10t' needs timm: pip install 'fedloom\[vision\]'"):
        backbone("timm/resnet10t", input_shape=(3, 32, 32))
