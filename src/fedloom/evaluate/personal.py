"""How well the global model serves each client, and how that is averaged over clients.

A client's accuracy is an expectation: the class-wise accuracy on the common test set, reweighted to the mix of
labels that the client holds, over the classes seen so far. It needs no test data on clients and no second
evaluation; what it cannot show is a difference between clients in how one class looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def expected_accuracy(class_accuracy: np.ndarray, label_counts: np.ndarray) -> np.ndarray:
    """Accuracy of each client's label mix, float64 [clients].

    class_accuracy: fractions [classes], NaN where a class has no test examples or has not been seen.
    label_counts: examples per client and class [clients, classes] (anything numpy can read).
    Returns sum_c n_ic a_c / sum_c n_ic over the classes with an accuracy; NaN for a client that has none.
    """
    counts = np.atleast_2d(np.asarray(label_counts, np.float64))
    accuracy = np.asarray(class_accuracy, np.float64)
    if counts.shape[1] != len(accuracy):
        raise ValueError(f"label counts over {counts.shape[1]} classes do not fit {len(accuracy)} class accuracies")
    known = ~np.isnan(accuracy)
    held = counts[:, known].sum(axis=1)
    hits = counts[:, known] @ accuracy[known]
    expected: np.ndarray = np.full(len(counts), np.nan)
    np.divide(hits, held, out=expected, where=held > 0)
    return expected


@dataclass(frozen=True)
class ClientSpread:
    """Accuracy over clients: who is averaged, and how, is in the names.

    weighted: mean weighted by the clients' examples. client_mean: plain mean over clients.
    client_worst10: mean over the worst tenth of the clients, rounded down, at least one client.
    client_std: standard deviation over clients, ddof 0. clients: how many have an accuracy. All None for 0.
    """

    weighted: float | None = None
    client_mean: float | None = None
    client_worst10: float | None = None
    client_std: float | None = None
    clients: int = 0

    def metrics(self, prefix: str = "accuracy") -> dict[str, float | int | None]:
        """Named values for a metrics row: `<prefix>/weighted`, `<prefix>/client_mean`, ..., `<prefix>/clients`."""
        return {
            f"{prefix}/weighted": self.weighted,
            f"{prefix}/client_mean": self.client_mean,
            f"{prefix}/client_worst10": self.client_worst10,
            f"{prefix}/client_std": self.client_std,
            f"{prefix}/clients": self.clients,
        }


def spread(accuracies: Sequence[float] | np.ndarray, sizes: Sequence[float] | np.ndarray) -> ClientSpread:
    """Summarise accuracies over clients; clients whose accuracy is NaN are not part of the population.

    accuracies: fractions [clients]. sizes: examples per client [clients], the weights of `weighted` (without
    any example among them the plain mean is taken).
    """
    acc, n = np.asarray(accuracies, np.float64), np.asarray(sizes, np.float64)
    if acc.shape != n.shape:
        raise ValueError(f"{len(acc)} accuracies do not fit {len(n)} client sizes")
    known = ~np.isnan(acc)
    acc, n = acc[known], n[known]
    if len(acc) == 0:
        return ClientSpread()
    mean = float(acc.mean())
    worst = np.sort(acc)[: max(1, len(acc) // 10)]
    weighted = float(acc @ n / n.sum()) if n.sum() > 0 else mean
    return ClientSpread(weighted, mean, float(worst.mean()), float(acc.std()), len(acc))
