"""The bundled digits in four renderings."""

import numpy as np
import pytest
import torch

from fedloom.core import DataError
from fedloom.data import load_source
from fedloom.data.renderings import NOISE, RENDERINGS, blurred, noisy, rendered


def digit(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (3, 1, 8, 8), dtype=np.uint8)


def test_digits_come_in_four_domains_of_the_same_images():
    source, plain = load_source("digits-domains"), load_source("digits")
    assert (
        source.domain_names == ("rotated", "inverted", "noisy", "blurred") and source.name == "sklearn/digits-domains"
    )
    assert source.x_train.shape == (4 * 1438, 1, 8, 8) and source.x_train.dtype == torch.uint8
    assert torch.bincount(source.domains_train).tolist() == [1438] * 4
    assert torch.bincount(source.domains_test).tolist() == [359] * 4
    for split in ("train", "test"):
        x, y, domains = (getattr(source, f"{field}_{split}") for field in ("x", "y", "domains"))
        wanted = getattr(plain, f"x_{split}")
        assert torch.equal(x[domains == 1], 255 - wanted)
        assert torch.equal(torch.rot90(x[domains == 0], -1, (2, 3)), wanted)
        assert all(torch.equal(y[domains == d], getattr(plain, f"y_{split}")) for d in range(4))


def test_the_bytes_of_the_renderings_are_fixed():
    found = load_source("digits-domains")
    assert found.fingerprint == "f8d1fd56f62bea2ada8de0e5a176b091fa2396ff089be4947c7f2201ab2fdfc1"
    assert load_source("digits-domains", split_seed=1).fingerprint != found.fingerprint


def test_domains_of_the_digits_can_be_ignored_but_not_named():
    plain = load_source("digits-domains", domain="none")
    assert plain.domains_train is None and len(plain.y_train) == 4 * 1438
    for name in ("digits", "digits-domains"):
        with pytest.raises(DataError, match=r"data.domain 'style' names no column"):
            load_source(name, domain="style")


def test_blur_is_the_binomial_filter_with_black_beyond_the_border():
    x, weights = digit(), np.outer([1, 4, 6, 4, 1], [1, 4, 6, 4, 1]) / 256
    wide = np.pad(x[1, 0].astype(float), 2)
    byhand = [[(wide[i : i + 5, j : j + 5] * weights).sum() for j in range(8)] for i in range(8)]
    assert np.array_equal(blurred(x)[1, 0], np.floor(np.asarray(byhand) + 0.5))
    assert blurred(np.full((1, 1, 8, 8), 255, np.uint8))[0, 0, 4, 4] == 255


def test_noise_lies_behind_the_digit_and_is_the_same_every_time():
    x = digit()
    found = noisy(x)
    assert (found >= x).all() and np.array_equal(found, noisy(x))
    background = noisy(np.zeros((200, 1, 8, 8), np.uint8))
    assert background.max() == NOISE and abs(background.mean() - NOISE / 2) < 1


def test_an_image_looks_the_same_whichever_rows_are_chosen():
    x, y = digit(), np.array([4, 5, 6])
    every = rendered(x, y, np.ones(3, bool))
    some = rendered(x, y, np.array([False, True, True]))
    assert some[1].tolist() == [5, 6] * 4 and some[2].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert np.array_equal(some[0], every[0].reshape(len(RENDERINGS), 3, 1, 8, 8)[:, 1:].reshape(-1, 1, 8, 8))
