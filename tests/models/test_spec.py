"""The network as a value: the same initial values everywhere, options, weights from a file."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedloom.models
from fedloom.core import ConfigError
from fedloom.core.payload import digest
from fedloom.models import NetworkSpec


def fingerprint(spec: NetworkSpec) -> str:
    return digest({"all": spec.classifier().state_dict()})


def test_same_values_each_time_and_the_global_generator_is_untouched() -> None:
    spec = NetworkSpec("resnet8", 10, (3, 16, 16), seed=5)
    before = torch.random.get_rng_state()
    first = fingerprint(spec)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    assert fingerprint(pickle.loads(pickle.dumps(spec))) == first
    assert fingerprint(NetworkSpec("resnet8", 10, (3, 16, 16), seed=6)) != first


def test_backbone_and_head_have_streams_of_their_own() -> None:
    a = NetworkSpec("mlp", 10, (4,), seed=1)
    body, whole = a.backbone().state_dict(), a.classifier().state_dict()
    assert all(torch.equal(whole[f"backbone.{n}"], t) for n, t in body.items())
    other = NetworkSpec("digits_cnn", 10, (1, 8, 8), seed=1, options={"width": 128}).classifier()
    assert torch.equal(whole["head.weight"], other.head.weight)


def test_options_become_hashable_pairs() -> None:
    spec = NetworkSpec("mlp", 2, [4], options={"hidden": [8, 6]})
    assert spec.options == (("hidden", (8, 6)),) and spec.input_shape == (4,)
    assert hash(spec) == hash(NetworkSpec("mlp", 2, (4,), options=(("hidden", (8, 6)),)))
    assert spec.classifier().num_features == 6
    with pytest.raises(ConfigError, match="num_classes must be at least 1, got 0"):
        NetworkSpec("mlp", 0, (4,))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_of_a_backbone_or_of_a_classifier(tmp_path: Path, suffix: str) -> None:
    source = NetworkSpec("resnet8", 4, (3, 8, 8), seed=9).classifier()
    write = save_file if suffix == ".safetensors" else torch.save
    for part, name in ((source, "whole"), (source.backbone, "body")):
        path = tmp_path / f"{name}{suffix}"
        write(part.state_dict(), path)
        loaded = NetworkSpec("resnet8", 7, (3, 8, 8), seed=1, weights=str(path)).classifier()
        for (key, a), b in zip(
            source.backbone.state_dict().items(), loaded.backbone.state_dict().values(), strict=True
        ):
            assert torch.equal(a, b), key
        assert loaded.head.out_features == 7


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    def spec(path: Path) -> NetworkSpec:
        return NetworkSpec("mlp", 2, (4,), weights=str(path))

    good = NetworkSpec("mlp", 2, (4,)).backbone().state_dict()
    cases = {
        "short": ({k: t for k, t in good.items() if "bias" not in k}, r"missing 'layers\.0\.0\.bias', unknown none"),
        "long": (good | {"extra": torch.zeros(1)}, "missing none, unknown 'extra'"),
        "shape": (
            good | {"layers.0.0.bias": torch.zeros(3)},
            r"'layers\.0\.0\.bias'.*\(3,\), the network needs \(128,\)",
        ),
    }
    cases["nan"] = good | {"layers.0.0.bias": torch.full((128,), torch.nan)}, r"not finite in 'layers\.0\.0\.bias'"
    cases["whole"] = good | {"layers.0.0.bias": torch.zeros(128).int()}, r"whole numbers \(int32\) in 'layers\.0\.0\.b"
    for name, (state, message) in cases.items():
        save_file(state, tmp_path / name)
        path = (tmp_path / name).rename(tmp_path / f"{name}.safetensors")
        with pytest.raises(ConfigError, match=message):
            spec(path).backbone()
    with pytest.raises(ConfigError, match=r"no file .*nowhere.*give the path"):
        spec(tmp_path / "nowhere.pt").backbone()
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    for suffix in ("safetensors", "pt"):
        with pytest.raises(ConfigError, match="cannot read"):
            spec(tmp_path / f"junk.{suffix}").backbone()
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ConfigError, match="holds no state dict"):
        spec(tmp_path / "list.pt").backbone()
    torch.save({"state_dict": good}, tmp_path / "wrapped.pt")
    assert spec(tmp_path / "wrapped.pt").backbone().num_features == 128


def test_importing_the_rooms_is_light() -> None:
    """Heavy libraries are imported inside functions, never at the top of a file."""
    heavy = {"torchvision", "timm", "safetensors", "datasets", "sklearn", "scipy"}
    package = Path(fedloom.models.__file__).parents[1]
    for path in [*package.glob("models/*.py"), *package.glob("merge/*.py")]:
        for node in ast.parse(path.read_text()).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {module.split(".")[0] for module in modules}, path
