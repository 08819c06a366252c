"""Accuracy over domains: mean, spread and the worst one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def domain_summary(accuracy: Mapping[str, float]) -> dict[str, float | None]:
    """Values for the summary from {domain: accuracy}; every value None when there is no domain.

    domain_std divides by the number of domains (ddof 0), domain_std_ddof1 by one less: published tables use
    either, so both are given. A single domain has no ddof-1 deviation.
    """
    values = np.asarray(list(accuracy.values()), np.float64)
    if len(values) == 0:
        return dict.fromkeys(("domain_mean", "domain_std", "domain_std_ddof1", "domain_worst"))
    return {
        "domain_mean": float(values.mean()),
        "domain_std": float(values.std()),
        "domain_std_ddof1": float(values.std(ddof=1)) if len(values) > 1 else None,
        "domain_worst": float(values.min()),
    }
