import numpy as np
import pytest

from fedloom.evaluate.personal import ClientSpread, expected_accuracy, spread


def test_named_means():
    metrics = spread([1.0, 0.0], [1, 99]).metrics("acc")
    assert metrics["acc/weighted"] == pytest.approx(0.01)
    assert metrics["acc/client_mean"] == 0.5
    assert metrics["acc/clients"] == 2
    assert metrics["acc/client_std"] == 0.5


def test_expected_accuracy_reweights_to_the_labels_of_a_client():
    accuracy = np.array([1.0, 0.5, np.nan])
    counts = [[2, 2, 0], [0, 1, 9], [0, 0, 5], [0, 0, 0]]
    np.testing.assert_allclose(expected_accuracy(accuracy, counts), [0.75, 0.5, np.nan, np.nan])


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (100, 10)])
def test_worst_tenth(clients, worst):
    accuracies = np.linspace(0.9, 0.1, clients)
    assert spread(accuracies, np.ones(clients)).client_worst10 == pytest.approx(np.sort(accuracies)[:worst].mean())


def test_clients_without_an_accuracy_are_not_counted():
    found = spread([0.4, np.nan, 0.8], [1, 50, 3])
    assert (found.clients, found.client_mean, found.weighted) == (2, pytest.approx(0.6), pytest.approx(0.7))


def test_nobody():
    assert spread([], []) == spread([np.nan], [3]) == ClientSpread()
    assert ClientSpread().metrics()["accuracy/client_mean"] is None


def test_sizes_of_zero_give_the_plain_mean():
    assert spread([0.2, 0.4], [0, 0]).weighted == pytest.approx(0.3)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="3 classes do not fit 2"):
        expected_accuracy(np.ones(2), np.ones((4, 3)))
    with pytest.raises(ValueError, match="1 accuracies do not fit 2"):
        spread([0.5], [1, 2])


def test_the_label_mix_of_the_whole_test_set_gives_its_accuracy():
    correct, total = np.array([3, 1, 0]), np.array([4, 2, 2])
    assert expected_accuracy(correct / total, total)[0] == pytest.approx(4 / 8)
