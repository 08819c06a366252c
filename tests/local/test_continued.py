from fedloom.local.continued import Continued
from toys.federation import BlobPlan


def order(data, epoch):
    return [k for batch in data.epoch(epoch, 8) for k in batch.index.tolist()]


def test_epochs_count_on_and_visits_with_them():
    data = BlobPlan().train(0, 0, 0, "train")
    expected, before = order(data, 5), data.visits.count
    later = Continued(data, 3)
    assert order(later, 2) == expected != order(data, 2)
    assert data.visits.count == before + 2 * len(data) and later.steps(8) == data.steps(8)
    assert order(later, 0) == order(data, 3)
