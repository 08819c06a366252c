import json

import numpy as np
import pytest
import torch

from fedloom.evaluate.summary import EXTRA_KEYS, SUMMARY_KEYS, make_summary


def test_every_key_in_order_and_null_where_unknown():
    summary = make_summary(method="fedavg", stages=3)
    assert tuple(summary) == SUMMARY_KEYS
    assert len(SUMMARY_KEYS) == len(set(SUMMARY_KEYS)) == 36
    assert (summary["method"], summary["stages"], summary["forgetting"]) == ("fedavg", 3, None)


def test_extras_follow():
    summary = make_summary(**dict.fromkeys(reversed(EXTRA_KEYS)), method="fedavg")
    assert tuple(summary) == SUMMARY_KEYS + EXTRA_KEYS
    some = make_summary(personal_domain_accuracy={"photo": 0.5, "sketch": None}, unseen_examples=2)
    assert tuple(some) == (*SUMMARY_KEYS, "unseen_examples", "personal_domain_accuracy")
    assert some["personal_domain_accuracy"] == {"photo": 0.5, "sketch": None}


def test_unknown_key_names_the_closest():
    with pytest.raises(KeyError, match="final_accuracy"):
        make_summary(final_acuracy=0.5)


def test_values_become_plain_json():
    summary = make_summary(
        final_accuracy=np.float32(0.5),
        seed=np.int64(3),
        parameters=torch.tensor(7),
        forgetting=float("nan"),
        wall_seconds=np.inf,
        accuracy_matrix=np.array([[0.5, np.nan]]),
        domain_accuracy={"photo": torch.tensor(0.25)},
        per_client_accuracy_mean=torch.tensor([0.5, 1.0]),
    )
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert (summary["seed"], summary["parameters"], summary["forgetting"], summary["wall_seconds"]) == (
        3,
        7,
        None,
        None,
    )
    assert summary["accuracy_matrix"] == [[0.5, None]]
    assert summary["domain_accuracy"] == {"photo": 0.25}


def test_values_without_a_plain_form():
    with pytest.raises(TypeError, match="object"):
        make_summary(method=object())
