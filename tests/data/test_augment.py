import pytest
import torch

from fedloom.core import ConfigError
from fedloom.data.augment import Prepare, crop, flip


def test_normalisation_per_channel():
    x = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 2, 1, 1)
    out = Prepare((0.5, 0.25), (0.5, 0.125))(x)
    assert torch.allclose(out.flatten(), torch.tensor([-1.0, 6.0])) and out.dtype == torch.float32


def test_without_statistics_bytes_are_scaled_and_floats_pass():
    assert Prepare()(torch.tensor([[0, 255]], dtype=torch.uint8)).tolist() == [[0.0, 1.0]]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    assert torch.equal(Prepare()(x), kept) and torch.equal(x, kept)
    assert Prepare((0.5,), (0.5,))(torch.full((2, 7), 255, dtype=torch.uint8)).eq(1).all()


def test_flip_mirrors_about_half():
    x = torch.arange(4, dtype=torch.uint8).reshape(1, 1, 1, 4).repeat(400, 1, 1, 1)
    out = flip(x, torch.Generator().manual_seed(0)).flatten(1)
    mirrored = out.eq(torch.tensor([3, 2, 1, 0])).all(1)
    assert (mirrored | out.eq(torch.tensor([0, 1, 2, 3])).all(1)).all() and 150 < int(mirrored.sum()) < 250


def test_crop_equals_a_loop_over_the_padded_image():
    x = torch.randint(1, 255, (50, 3, 8, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    places = torch.randint(0, 9, (2, 50), generator=torch.Generator().manual_seed(2))
    padded = torch.zeros(50, 3, 16, 14, dtype=torch.uint8)
    padded[:, :, 4:12, 4:10] = x
    want = torch.stack([padded[i, :, r : r + 8, c : c + 6] for i, (r, c) in enumerate(places.T.tolist())])
    assert torch.equal(crop(x, torch.Generator().manual_seed(2)), want)


def test_augmentation_is_drawn_only_with_a_generator_and_repeats():
    x = torch.randint(0, 255, (16, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    prepare = Prepare(augment="crop_flip")
    assert torch.equal(prepare(x, None), x / 255)
    first, again = (prepare(x, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again) and not torch.equal(first, x / 255)


def test_unknown_augmentation():
    with pytest.raises(ConfigError, match="Did you mean 'crop_flip'"):
        Prepare(augment="crop_flp")
    with pytest.raises(ConfigError, match="std must be positive"):
        Prepare((0.5,), (0.0,))
