"""CLIP checkpoints: which files and folders are read, and what is said of those that do not fit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedloom.core import ConfigError
from fedloom.core.seeds import seeded
from fedloom.models.clip import named
from fedloom.models.clip.checkpoint import OPENAI, Design, check_model, model_of
from fedloom.models.clip.convert import to_transformers, transformers_config
from fedloom.models.clip.named import described
from toys.small_clip import MEAN, STD, architecture, small_model, write_folder


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """open_clip knows the small architecture by name, as `tiny` and `tiny-quickgelu`."""
    import open_clip

    configs = {"tiny": architecture(), "tiny-quickgelu": architecture(quick_gelu=True)}
    known = open_clip.get_model_config
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: configs.get(name) or known(name))


def loaded(name: str, weights: Any = None, **options: Any) -> Any:
    found = described(name, None if weights is None else str(weights), options)
    with seeded(0, "backbone"):
        return found.module()


def assert_same(module: Any, model: Any) -> None:
    own, theirs = module.state_dict(), model.state_dict()
    assert own.keys() == theirs.keys() and all(torch.equal(own[key], theirs[key]) for key in own)
    assert all(t.dtype == torch.float32 for t in own.values() if t.is_floating_point())


def test_clip_small_comes_from_a_file_or_its_folder_in_fp32(tmp_path: Path) -> None:
    model = write_folder(tmp_path, stem=True)
    for weights in (tmp_path, tmp_path / "model.safetensors"):
        found = described("clip_small", str(weights), {})
        assert found.design.statistics == (MEAN, STD) and found.file == tmp_path / "model.safetensors"
        assert_same(found.module(), model)


def test_clip_small_is_looked_for_in_the_working_directory_and_then_beside_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, source = tmp_path / "here", tmp_path / "checkout"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(named, "__file__", str(source / "src" / "fedloom" / "models" / "clip" / "named.py"))
    with pytest.raises(ConfigError) as error:
        described("clip_small", None, {})
    assert f"'{here}/examples/clip-small/model.safetensors'" in str(error.value)
    assert f"'{source}/examples/clip-small/model.safetensors'" in str(error.value)
    assert "`fedloom pretrain-clip clip-small`" in str(error.value) and error.value.exit_code == 2
    beside = write_folder(source / "examples" / "clip-small", seed=1)
    assert_same(loaded("clip_small"), beside)
    assert_same(loaded("clip_small"), beside)
    write_folder(here / "examples" / "clip-small", seed=2)
    assert described("clip_small", None, {}).file == here / "examples" / "clip-small" / "model.safetensors"
    monkeypatch.setattr(named, "__file__", str(tmp_path / "site-packages" / "fedloom" / "models" / "clip" / "named.py"))
    assert len(named._places()) == 1, "an installed package has no checkout"


def test_clip_small_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no file '.*none.safetensors'; make it with `fedloom pretrain-clip clip-small`"
    ):
        described("clip_small", str(tmp_path / "none.safetensors"), {})
    with pytest.raises(ConfigError, match=r"holds none of open_clip_model.safetensors, model.safetensors"):
        described("clip_small", str(tmp_path), {})
    save_file(small_model().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no open_clip_config.json beside"):
        described("clip_small", str(tmp_path), {})


def test_random_weights_come_only_when_asked_for(tmp_path: Path) -> None:
    found = described("clip_small", "random", {})
    assert found.file is None and found.design.architecture["stem"]["widths"][-1] == 160
    assert found.design.architecture["text_cfg"]["vocab_size"] == 49408
    with torch.device("meta"):
        module = model_of(found.design, "clip_small")
    assert sum(p.numel() for p in module.parameters()) < 8_000_000
    own = {"config": Design(architecture(), (MEAN, STD)).config()}
    small = described("clip_small", "random", own)
    assert small.design.statistics == (MEAN, STD) and small.module().visual.conv1.weight.shape[0] == 32
    write_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"model.options.config of clip_small is for model.weights random"):
        described("clip_small", str(tmp_path), own)


def test_open_clip_takes_a_state_dict_of_every_kind(tmp_path: Path, tiny: None) -> None:
    model = small_model(3)
    state = model.state_dict()
    torch.save(state, tmp_path / "plain.pt")
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": t for k, t in state.items()}}, tmp_path / "trained.pt")
    save_file(state | {"logit_scale": state["logit_scale"].reshape(1)}, tmp_path / "wide.safetensors")
    for file in ("plain.pt", "trained.pt", "wide.safetensors"):
        assert described("open_clip/tiny", str(tmp_path / file), {}).design.statistics == OPENAI
        assert_same(loaded("open_clip/tiny", tmp_path / file), model)


def test_open_clip_takes_an_archive_of_openai(tmp_path: Path, tiny: None) -> None:
    model = small_model(4, quick_gelu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        archive = torch.jit.script(Archive(model.state_dict()))
        archive.save(str(tmp_path / "tiny.pt"))
    assert_same(loaded("open_clip/tiny-quickgelu", tmp_path / "tiny.pt"), half(model))
    with pytest.raises(ConfigError, match=r"was trained with quick_gelu, and model open_clip/tiny computes GELU"):
        loaded("open_clip/tiny", tmp_path / "tiny.pt")


def half(model: Any) -> Any:
    return model.half().float()


class Holder(torch.nn.Module):
    """A module that only holds what its names say."""


class Archive(torch.nn.Module):
    """Tensors in fp16 under their dotted names, and the three numbers that OpenAI's archives also have."""

    def __init__(self, state: dict[str, torch.Tensor]):
        super().__init__()
        for key, tensor in state.items():
            *path, leaf = key.split(".")
            at: Any = self
            for part in path:
                if not hasattr(at, part):
                    at.add_module(part, Holder())
                at = getattr(at, part)
            at.register_buffer(leaf, tensor.half())
        for name in ("input_resolution", "context_length", "vocab_size"):
            self.register_buffer(name, torch.tensor(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def write_transformers(folder: Path, *, quick_gelu: bool = False) -> Any:
    model = small_model(5, quick_gelu=quick_gelu)
    folder.mkdir(exist_ok=True)
    save_file(to_transformers(model.state_dict()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(transformers_config(architecture(quick_gelu=quick_gelu))))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    return model


def test_open_clip_takes_a_folder_of_transformers_and_its_activation(tmp_path: Path, tiny: None) -> None:
    for quick_gelu, names in ((True, ("tiny-quickgelu", "tiny")), (False, ("tiny", "tiny-quickgelu"))):
        folder = tmp_path / f"quick-{quick_gelu}"
        model = write_transformers(folder, quick_gelu=quick_gelu)
        right, wrong = (f"open_clip/{name}" for name in names)
        x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        for name, weights in ((right, folder), (right, folder / "model.safetensors"), (f"open_clip/{folder}", None)):
            found = described(name, None if weights is None else str(weights), {})
            assert found.design.statistics == (MEAN, STD)
            module = found.module().eval()
            assert_same(module, model)
            assert torch.equal(module.encode_image(x), model.encode_image(x))
        with pytest.raises(ConfigError, match=f"model {wrong} computes .*: take the other one"):
            loaded(wrong, folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"whose activation config.json tells; put that beside it"):
        loaded("open_clip/tiny", folder)


def test_a_folder_is_a_model_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_folder(tmp_path / "mine", file="open_clip_model.safetensors", quick_gelu=True, stem=True)
    monkeypatch.chdir(tmp_path)
    found = described("open_clip/./mine", None, {})
    assert found.design.architecture["quick_gelu"] and found.design.statistics == (MEAN, STD)
    assert_same(found.module(), model)
    assert described("open_clip/./mine", "random", {}).file is None
    other = small_model(9, quick_gelu=True, stem=True)
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    assert_same(loaded("open_clip/./mine", tmp_path / "other.safetensors"), other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds neither open_clip_config.json nor config.json of a CLIPModel"):
        described("open_clip/./empty", None, {})


def test_another_architecture_is_told_by_its_keys(tmp_path: Path, tiny: None) -> None:
    state = small_model(layers=3).state_dict()
    state["visual.proj"] = torch.zeros(32, 16)
    del state["text_projection"]
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError) as error:
        loaded("open_clip/tiny", tmp_path / "other.safetensors")
    said = str(error.value)
    assert "is of another architecture than model open_clip/tiny (missing: 'text_projection'; unknown: " in said
    assert "'visual.transformer.resblocks.2.attn.in_proj_bias'" in said and "and 9 more" in said
    assert "of another shape: 'visual.proj' [32, 16] for [32, 32])" in said and "\n" not in said


def test_what_no_tensor_tells_is_compared_with_the_configuration(tmp_path: Path, tiny: None) -> None:
    write_folder(tmp_path, head_width=8)
    with pytest.raises(ConfigError, match=r"\(vision_cfg.head_width is 8, not 16\)"):
        loaded("open_clip/tiny", tmp_path)
    write_folder(tmp_path, quick_gelu=True)
    with pytest.raises(ConfigError, match="was trained with quick_gelu, and model open_clip/tiny computes GELU"):
        loaded("open_clip/tiny", tmp_path)


def test_open_clip_names_need_weights_or_say_random() -> None:
    for weights, words in (
        (None, "model open_clip/ViT-B-16 needs model.weights: the path of a checkpoint, pretrained:TAG"),
        ("pretrained:opanai", r"unknown tag of open_clip/ViT-B-16 'opanai'. Did you mean 'openai'\?"),
        ("/nowhere/x.pt", "no file '/nowhere/x.pt'"),
    ):
        with pytest.raises(ConfigError, match=words):
            described("open_clip/ViT-B-16", weights, {})
    assert described("open_clip/ViT-B-16", "random", {}).design.architecture["embed_dim"] == 512
    with pytest.raises(ConfigError, match=r"unknown open_clip model 'ViT-B-17'. Did you mean 'ViT-B-16'\?"):
        described("open_clip/ViT-B-17", "random", {})
    with pytest.raises(
        ConfigError, match=r"unknown option of model clip_small 'class_word'. Did you mean 'class_words'\?"
    ):
        described("clip_small", "random", {"class_word": 1})


def test_published_weights_are_of_the_tags_activation(
    tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    model = small_model(6, quick_gelu=True)
    save_file(model.state_dict(), tmp_path / "fetched.safetensors")
    tag = {"url": "somewhere", "quick_gelu": True, "mean": MEAN, "std": STD}
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda name, tag_name: tag)
    monkeypatch.setattr(open_clip, "download_pretrained", lambda cfg: str(tmp_path / "fetched.safetensors"))
    found = described("open_clip/tiny", "pretrained:mine", {})
    assert found.design.architecture["quick_gelu"] and found.design.statistics == (MEAN, STD)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(found.module().eval().encode_image(x), model.encode_image(x))

    def away(cfg: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(open_clip, "download_pretrained", away)
    with pytest.raises(
        ConfigError, match=r"'pretrained:mine' of open_clip/tiny cannot be had \(OSError: no route to host\)"
    ):
        described("open_clip/tiny", "pretrained:mine", {})


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("RN50", "an image tower that is no vision transformer"),
        ("ViT-L-14-CLIPA", "text_cfg.hf_tokenizer_name"),
        ("ViT-B-16-SigLIP", "custom_text"),
        ("convnext_base", "vision_cfg.timm_model_name"),
        ("coca_ViT-B-32", "custom_text"),
    ],
)
def test_models_of_another_kind_are_refused_by_what_they_have(name: str, what: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=f"model open_clip/{name} has {what}") as error:
        described(f"open_clip/{name}", "random", {}).module()
    assert "take a CLIP of plain transformers, such as open_clip/ViT-B-16" in str(error.value)


def test_towers_of_another_form_are_refused() -> None:
    for section, changes, words in (
        ("text_cfg", {"no_causal_mask": True}, "a text tower without causal mask"),
        ("text_cfg", {"pool_type": "last"}, "text pooling last"),
        ("text_cfg", {"proj_bias": True}, "a text projection of another form"),
        ("text_cfg", {"vocab_size": 32000}, "a vocabulary of 32,000 entries, and open_clip's tokeniser has 49,408"),
        ("vision_cfg", {"attentional_pool": True}, "an image tower that pools by attention"),
        ("vision_cfg", {"qk_norm": True, "block_type": "custom"}, "blocks of another form"),
    ):
        config = architecture()
        config[section] |= changes
        with torch.device("meta"), pytest.raises(ConfigError, match=f"model it has {words}"):
            model_of(Design(config), "it")
    check_model(small_model(), "it")


def said(pictures: Any) -> str:
    return json.dumps({"model_cfg": architecture(), "preprocess_cfg": pictures})


PICTURES = [
    ([1, 2], "what it says of the pictures must be a mapping with mean and std"),
    ({"mean": ["a", "b", "c"], "std": [1, 1, 1]}, "mean and std of the pictures must be lists of three numbers"),
    ({"mean": [float("nan")] * 3, "std": [1, 1, 1]}, "mean and std of the pictures must be lists of three numbers"),
    ({"mean": [0, 0, 0], "std": [1, 0, 1]}, r"std of the pictures must be above 0, got \[1, 0, 1\]"),
]


def test_broken_configurations_are_told_in_words(tmp_path: Path) -> None:
    write_folder(tmp_path)
    for text, words in (
        ("{", r"cannot read '.*open_clip_config.json' \(JSONDecodeError\)"),
        ("[]", "must hold model_cfg with embed_dim, vision_cfg and text_cfg, as open_clip writes it; it has list"),
        ('{"model_cfg": {"embed_dim": 3}}', "must hold model_cfg .*; it has model_cfg"),
        (
            json.dumps({"model_cfg": architecture(), "preprocess_cfg": {"mean": [1], "std": [1]}}),
            "lists of three numbers",
        ),
        *((said(pictures), words) for pictures, words in PICTURES),
        (json.dumps({"model_cfg": {**architecture(stem=True), "stem": {}}}), "stem must hold widths"),
        (json.dumps({"model_cfg": architecture(patch_size=0)}), r"cannot be built .*\(ZeroDivisionError: .*mend it"),
        (json.dumps({"model_cfg": architecture(widht=3)}), "cannot be built from its configuration .*widht"),
    ):
        (tmp_path / "open_clip_config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=words):
            loaded("clip_small", tmp_path)


def test_values_that_no_model_computes_with_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    for change, words in (
        ({"visual.proj": torch.full((32, 32), torch.nan).half()}, "values that are not finite in 'visual.proj'"),
        ({"ln_final.bias": torch.zeros(24, dtype=torch.int8)}, r"whole numbers \(int8\) in 'ln_final.bias'"),
        ({"logit_scale": torch.zeros(3)}, r"of another architecture .*'logit_scale' \[3\] for \[\]"),
        ({"logit_scale": torch.tensor(200.0)}, "logit_scale is 200, whose exponential is not finite"),
    ):
        save_file({**good, **change}, file)
        with pytest.raises(ConfigError, match=words):
            loaded("clip_small", tmp_path)


def test_a_configuration_of_transformers_that_says_nonsense_is_told_in_words(tmp_path: Path) -> None:
    for change, words in (
        ({"text_config": "x"}, "does not describe a CLIPModel of transformers"),
        (
            {"vision_config": {"num_attention_heads": 0, "hidden_act": "gelu"}},
            "does not describe a CLIPModel .*ZeroDivisionError",
        ),
        ({"text_config": {"hidden_act": ["gelu"]}}, "does not describe a CLIPModel .*TypeError"),
    ):
        config = {**transformers_config(architecture()), **change}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(ConfigError, match=words):
            described(f"open_clip/{tmp_path}", "random", {})
    (tmp_path / "config.json").write_text(json.dumps(transformers_config(architecture())), encoding="utf-8")
    (tmp_path / "preprocessor_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="must be a mapping with image_mean and image_std"):
        described(f"open_clip/{tmp_path}", "random", {})


def test_a_folder_has_no_published_weights(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"open_clip publishes no weights of .*, so 'pretrained:openai' is none"):
        described(f"open_clip/{tmp_path}", "pretrained:openai", {})
