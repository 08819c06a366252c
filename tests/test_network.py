from __future__ import annotations

from pathlib import Path

from fedloom.network import own_tokenizer


def test_a_model_of_transformers_brings_its_tokenizer(tmp_path: Path) -> None:
    assert own_tokenizer("transformers/google/switch-base-16") == "google/switch-base-16"
    assert own_tokenizer(f"transformers/{tmp_path}") is None, "a folder without one: it is trained"
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert own_tokenizer(f"transformers/{tmp_path}") == str(tmp_path)
    assert own_tokenizer("switch_encoder") is own_tokenizer("auto") is own_tokenizer("timm/vit") is None
