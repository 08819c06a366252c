"""The contents of `summary.json`: one flat mapping with fixed keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedloom.core.errors import unknown

SUMMARY_KEYS = (
    "method",
    "preset",
    "dataset",
    "scenario",
    "engine",
    "seed",
    "clients",
    "stages",
    "rounds",
    "final_accuracy",
    "average_incremental_accuracy",
    "forgetting",
    "backward_transfer",
    "accuracy_matrix",
    "per_client_accuracy_mean",
    "per_client_accuracy_worst10",
    "domain_accuracy",
    "domain_mean",
    "domain_std",
    "domain_std_ddof1",
    "domain_worst",
    "measures",
    "bytes_up",
    "bytes_down",
    "sample_visits",
    "pass_visits",
    "parameters",
    "active_parameters",
    "flops_per_example",
    "wall_seconds",
    "train_seconds",
    "peak_rss_bytes",
    "rejected_updates",
    "failed_clients",
    "params_sha256",
    "state_sha256",
)

EXTRA_KEYS = (
    "accuracy_within_task",
    "unseen_examples",
    "degraded_rounds",
    "data_view",
    "personal_domain_accuracy",
    "personal_domain_mean",
    "personal_domain_std",
    "personal_domain_std_ddof1",
    "personal_domain_worst",
)


def make_summary(**known: Any) -> dict[str, Any]:
    """Every summary key in order, the unknown ones None; extras follow when given.

    Fractions in [0, 1], bytes, seconds. NumPy and torch values become plain ones; NaN and infinity, which
    JSON cannot hold, become None. Raises `KeyError` naming a key that the summary does not have.
    """
    for key in known:
        if key not in SUMMARY_KEYS and key not in EXTRA_KEYS:
            raise KeyError(unknown("summary key", key, (*SUMMARY_KEYS, *EXTRA_KEYS)))
    summary = {key: plain(known.get(key)) for key in SUMMARY_KEYS}
    return summary | {key: plain(known[key]) for key in EXTRA_KEYS if key in known}


def plain(value: Any) -> Any:
    """Turn a value into what JSON holds: str, bool, int, finite float, list, dict with string keys, or None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no place in a summary")
