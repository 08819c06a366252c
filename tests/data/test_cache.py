import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.core import DataError
from fedloom.data import load_source, store_source
from fedloom.data.cache import Cache


def arrays():
    return (np.arange(24.0).reshape(12, 2), np.arange(12) % 2)


def entries(folder):
    return sorted(p for p in (folder / "sources").iterdir() if not p.name.startswith("."))


def test_pickle_is_a_small_reference_and_equal_in_another_process(private_cache, tmp_path):
    x = np.random.default_rng(0).normal(size=(3000, 8))
    source = load_source((x, np.arange(3000) % 3))
    blob = pickle.dumps(source)
    assert len(blob) < 2000
    (tmp_path / "blob").write_bytes(blob)
    code = (
        "import pickle, sys; s = pickle.load(open(sys.argv[1], 'rb'));"
        "print(s.fingerprint, float(s.x_train.double().sum()), s.notes)"
    )
    env = os.environ | {"FEDLOOM_CACHE": str(private_cache)}
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "blob")], env=env, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.split()[:2] == [source.fingerprint, str(float(source.x_train.double().sum()))]


def test_restored_tensors_are_mapped_and_writes_do_not_reach_the_file(private_cache):
    source = pickle.loads(pickle.dumps(load_source(arrays())))
    before = source.x_train.clone()
    source.x_train.zero_()
    assert torch.equal(pickle.loads(pickle.dumps(load_source(arrays()))).x_train, before)
    assert source.x_train.data_ptr() % 64 == 0


def test_unwritable_cache_falls_back_to_memory_with_a_line(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, "fedloom.data"):
        source = pickle.loads(pickle.dumps(load_source(arrays())))
        digits = load_source("digits")
    assert torch.equal(source.x_train, load_source(arrays()).x_train) and len(digits.y_train) == 1438
    assert "cannot be written" in caplog.text
    with pytest.raises(DataError, match="cannot be written; set FEDLOOM_CACHE"):
        store_source(source)


def test_stored_arrays_load_by_name(private_cache):
    source = load_source(arrays())
    name = store_source(source)
    assert load_source(name).fingerprint == source.fingerprint and load_source(name).name == "arrays"
    with pytest.raises(DataError, match="pass the arrays again"):
        load_source("stored:" + "0" * 64)


def test_domains_are_kept_pickled_and_stored(private_cache):
    source = load_source((*arrays(), ["a", "b", "c"] * 4))
    for again in (pickle.loads(pickle.dumps(source)), load_source(store_source(source))):
        assert again.fingerprint == source.fingerprint and again.domain_names == ("a", "b", "c")
        assert torch.equal(again.domains_train, source.domains_train)
        assert torch.equal(again.domains_test, source.domains_test)
    assert load_source(store_source(source), domain="none").domains_test is None


def test_domains_travel_without_a_cache(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "file" / "cache"))
    source = load_source((*arrays(), ["a", "b"] * 6))
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(again.domains_train, source.domains_train) and again.domain_names == ("a", "b")


def test_lost_domains_are_built_again(private_cache):
    first = load_source("digits-domains")
    (private_cache / "sources" / first.fingerprint / "domains_test.npy").unlink()
    again = load_source("digits-domains")
    assert again.fingerprint == first.fingerprint and torch.equal(again.domains_test, first.domains_test)


@pytest.mark.parametrize("damage", ["truncate", "garbage", "meta", "gone"])
def test_damaged_entry_is_built_again(private_cache, damage):
    first = load_source("digits")
    (entry,) = entries(private_cache)
    file = entry / "x_train.npy"
    data = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(data[:-10])
    elif damage == "garbage":
        file.write_bytes(data[:-100] + bytes(100))
        os.utime(file, ns=(1, 1))
    elif damage == "meta":
        (entry / "meta.json").write_text("{")
    else:
        file.unlink()
    again = load_source("digits")
    assert again.fingerprint == first.fingerprint and torch.equal(
        again.x_train[-50:], load_source("digits").x_train[-50:]
    )
    assert int(again.x_train[-1].sum()) > 0
    assert entries(private_cache) == [entry] and len(list((private_cache / "sources").iterdir())) == 1


def test_copied_cache_is_accepted(private_cache):
    load_source("digits")
    (entry,) = entries(private_cache)
    for file in entry.glob("*.npy"):
        os.utime(file, ns=(10**18, 10**18))
    assert Cache(private_cache).read(entry.name) is not None


def test_content_hash_is_remembered_by_size_and_times(tmp_path, monkeypatch):
    store, file = Cache(tmp_path / "c"), tmp_path / "data.bin"
    file.write_bytes(b"one")
    monkeypatch.setattr("fedloom.data.cache.CLOCK", -1.0)
    first = store.content_hash([file], tmp_path)
    monkeypatch.setattr("fedloom.data.cache.hash_file", lambda *a: pytest.fail("read again"))
    assert store.content_hash([file], tmp_path) == first
    monkeypatch.undo()
    file.write_bytes(b"two")
    assert store.content_hash([file], tmp_path) != first


def test_fresh_files_are_not_remembered(tmp_path, monkeypatch):
    store, file = Cache(tmp_path / "c"), tmp_path / "data.bin"
    monkeypatch.setattr("fedloom.data.cache.CLOCK", 3600.0)
    file.write_bytes(b"one")
    store.content_hash([file], tmp_path)
    assert not (tmp_path / "c" / "files").exists()


def test_nothing_in_the_cache_is_pickled(private_cache):
    load_source("digits")
    kinds = {p.suffix for p in Path(private_cache).rglob("*") if p.is_file()}
    assert kinds == {".npy", ".json"}
    assert json.loads(next(Path(private_cache).rglob("meta.json")).read_text())["files"]
