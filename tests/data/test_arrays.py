import numpy as np
import pytest
import torch

from fedloom.core import DataError
from fedloom.data import from_arrays, load_source


def xy(n=20, classes=2, shape=(3,)):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, *shape)), np.arange(n) % classes


def test_pair_is_split_by_class_and_floats_are_kept():
    x, y = xy()
    source = load_source((x, y))
    assert source.x_train.dtype == torch.float32 and len(source.x_train) == 16 and len(source.x_test) == 4
    assert torch.bincount(source.y_test).tolist() == [2, 2]
    assert source.mean == () and source.input_shape == (3,) and source.class_names == ("0", "1")
    rows = {tuple(r) for r in torch.cat([source.x_train, source.x_test]).tolist()}
    assert rows == {tuple(r) for r in x.astype(np.float32).tolist()}
    assert source.fingerprint == load_source((torch.tensor(x), torch.tensor(y))).fingerprint


def test_four_arrays_keep_their_split():
    x, y = xy()
    source = from_arrays((x, y, x[:5], y[:5]))
    assert len(source.x_train) == 20 and len(source.x_test) == 5


def test_domains_follow_the_labels():
    x, y = xy(24)
    where = np.repeat(["sea", "land", "air"], 8)
    source = from_arrays((x, y, where), test_fraction=0.25)
    assert source.domain_names == ("air", "land", "sea")
    cells = torch.bincount(source.domains_test * 2 + source.y_test)
    assert cells.tolist() == [1] * 6 and len(source.y_train) == 18
    rows = {tuple(row): name for row, name in zip(x.astype(np.float32).tolist(), where, strict=True)}
    for inputs, ids in ((source.x_train, source.domains_train), (source.x_test, source.domains_test)):
        assert [rows[tuple(row)] for row in inputs.tolist()] == [source.domain_names[d] for d in ids.tolist()]


def test_domains_of_given_splits_share_their_names():
    x, y = xy(6)
    source = from_arrays((x, y, [7, 7, 9, 9, 9, 9], x[:3], y[:3], [9, 11, 9]))
    assert source.domain_names == ("7", "9", "11")
    assert source.domains_train.tolist() == [0, 0, 1, 1, 1, 1] and source.domains_test.tolist() == [1, 2, 1]
    assert source.notes == ("domain '11' has no train example", "domain '7' has no test example")


def test_domains_of_arrays_can_be_ignored_and_have_no_column():
    x, y = xy()
    plain = load_source((x, y, np.zeros(len(y), int)), domain="none")
    assert plain.domains_train is None and plain.domain_names == ()
    assert plain.fingerprint == load_source((x, y)).fingerprint
    with pytest.raises(DataError, match=r"data.domain 'style' names no column"):
        load_source((x, y), domain="style")


def test_images_are_brought_to_one_layout_with_notes():
    grey = from_arrays((np.zeros((6, 5, 4), np.uint8), np.arange(6) % 2))
    assert grey.input_shape == (1, 5, 4) and "grey" in grey.notes[0]
    last = np.random.default_rng(0).integers(0, 255, (6, 5, 4, 3))
    colour = from_arrays((last, np.arange(6) % 2, last, np.arange(6) % 2))
    assert colour.x_train.dtype == torch.uint8 and colour.input_shape == (3, 5, 4) and len(colour.notes) == 2
    assert torch.equal(colour.x_train, torch.tensor(last).permute(0, 3, 1, 2).to(torch.uint8))


def test_statistics_of_bytes_are_exact():
    x = np.random.default_rng(0).integers(0, 256, (50, 3, 4, 4), dtype=np.uint8)
    y = np.arange(50) % 2
    source = from_arrays((x, y, x, y))
    assert np.allclose(source.mean, (x / 255).mean((0, 2, 3)), atol=1e-12)
    assert np.allclose(source.std, (x / 255).std((0, 2, 3)), atol=1e-12)
    flat = from_arrays((x.reshape(50, -1), y, x.reshape(50, -1), y))
    assert np.allclose(flat.mean, [(x / 255).mean()]) and np.allclose(flat.std, [(x / 255).std()])
    assert from_arrays((np.zeros((4, 1, 2, 2), np.uint8), [0, 0, 1, 1])).std == (1.0,)


def test_labels_are_reindexed_with_a_note():
    source = from_arrays((np.zeros((6, 2)), ["cat", "dog", "cat", "dog", "cat", "dog"]))
    assert source.class_names == ("cat", "dog") and "re-indexed to 0..1" in source.notes[0]
    gaps = from_arrays((np.zeros((6, 2)), np.array([10.0, 30, 10, 30, 10, 30])))
    assert gaps.class_names == ("10", "30") and gaps.y_train.max() == 1


def test_class_without_training_example_is_noted():
    source = from_arrays((np.zeros((4, 2)), [0, 1, 0, 1], np.zeros((3, 2)), [0, 1, 2]))
    assert source.num_classes == 3 and source.notes == ("1 classes have no training example: 2",)


def test_torch_datasets():
    x, y = xy(10, 2, (1, 4, 4))
    data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    assert from_arrays(data).fingerprint == from_arrays((x, y)).fingerprint
    pair = from_arrays((data, data))
    assert len(pair.x_train) == len(pair.x_test) == 10


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield 0, 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((np.zeros((3, 2)), [0, 1]), "train split has 3 inputs but 2 labels"),
        ((np.zeros((0, 2)), []), "empty"),
        ((np.array([[np.nan, 1], [1, 2], [1, 2]]), [0, 1, 0]), "1 train inputs hold NaN .* position 0"),
        ((np.array([[1, 1], [1, np.inf]]), [0, 0]), "position 1"),
        ((np.zeros((2, 2)), [0.5, 1]), "must be integers 0..C-1, got 0.5 at position 0"),
        ((np.zeros((2, 2)), [np.nan, 1]), "got nan"),
        ((np.zeros((2, 2)), [None, 1]), "got None"),
        ((np.zeros((2, 2)), np.eye(2)), r"y.argmax\(1\)"),
        ((np.zeros(4), [0, 1, 0, 1]), "inputs must be"),
        ((np.array(["2020", "2021"], "M8[Y]"), [0, 1]), "inputs must be numbers or texts"),
        ((np.zeros((2, 2)), [0, 1]), "one example per class"),
        ((np.zeros((4, 2)), [0, 1, 0, 1], np.zeros((2, 3)), [0, 1]), "same shape"),
        ((np.zeros((2, 2)), [0, 1], np.zeros((2, 2)), ["a", "b"]), "of one kind"),
        ((1, 2, 3), "x must be an array of examples"),
        ((1, 2, 3, 4, 5), "got tuple of length 5"),
        ((np.zeros((4, 2)), [0, 1, 0, 1], ["a", "b"]), "4 inputs but 2 domain labels"),
        ((np.zeros((2, 2)), [0, 1], ["a", " "]), "empty text at position 1"),
        ((np.zeros((2, 2)), [0, 1], [0.0, np.nan]), "domain labels must be integers 0..C-1, got nan at position 1"),
        ((np.zeros((2, 2)), [0, 1], ["a", None]), "got None at position 1"),
        ((np.zeros((2, 2)), [0, 1], [0, 1], np.zeros((1, 2)), [0], ["a"]), "of one kind"),
        ((np.zeros((2, 2)), [0, 1], ["a", "b"]), "one example per class and domain"),
        ({"x": 1}, "got dict"),
        (Stream(), "has no length"),
    ],
)  # fmt: skip
def test_bad_arrays_are_refused_in_words(data, message):
    with pytest.raises(DataError, match=message):
        from_arrays(data)


def test_given_class_names_bound_the_labels():
    with pytest.raises(DataError, match=r"integers 0..1, got 2 at position 2"):
        from_arrays((np.zeros((3, 2)), [0, 1, 2]), class_names=("a", "b"))
