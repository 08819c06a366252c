"""Accuracy over domains: mean, spread and the worst one, of the global view and of the clients' own."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np


def domain_summary(accuracy: Mapping[str, float | None]) -> dict[str, float | None]:
    """Values for the summary from {domain: accuracy}, over the domains that have one; all None when none has.

    domain_std divides by the number of domains (ddof 0), domain_std_ddof1 by one less: published tables use
    either, so both are given. A single domain has no ddof-1 deviation.
    """
    values = np.asarray([value for value in accuracy.values() if value is not None], np.float64)
    if len(values) == 0:
        return dict.fromkeys(("domain_mean", "domain_std", "domain_std_ddof1", "domain_worst"))
    return {
        "domain_mean": float(values.mean()),
        "domain_std": float(values.std()),
        "domain_std_ddof1": float(values.std(ddof=1)) if len(values) > 1 else None,
        "domain_worst": float(values.min()),
    }


def holders_mean(accuracy: np.ndarray, held: np.ndarray) -> list[float | None]:
    """Per domain the mean, over the clients that hold it, of their accuracy on all of its test examples.

    accuracy: fractions [clients, domains], NaN where there is none. held: examples per client and domain [clients,
    domains]. None for a domain that nobody holds, or on which no holder has an accuracy.
    """
    if accuracy.shape != held.shape:
        raise ValueError(f"accuracies {list(accuracy.shape)} do not fit the examples held {list(held.shape)}")
    columns = (
        column[(count > 0) & ~np.isnan(column)].tolist() for column, count in zip(accuracy.T, held.T, strict=True)
    )
    return [math.fsum(column) / len(column) if column else None for column in columns]
