"""From scores to the numbers of a run: counts, accuracy matrices, client and domain views, costs, statistics."""

from fedloom.evaluate.cost import active_parameters, flops_per_example, parameters, peak_rss_bytes
from fedloom.evaluate.domain import domain_summary
from fedloom.evaluate.matrix import AccuracyMatrix, forgetting_lander_compat, forgetting_mfcl_compat
from fedloom.evaluate.personal import ClientSpread, expected_accuracy, spread
from fedloom.evaluate.predict import Counts, count_correct
from fedloom.evaluate.statistics import Comparison, Interval, compare_paired, mean_interval
from fedloom.evaluate.summary import SUMMARY_KEYS, make_summary

__all__ = [
    "SUMMARY_KEYS",
    "AccuracyMatrix",
    "ClientSpread",
    "Comparison",
    "Counts",
    "Interval",
    "active_parameters",
    "compare_paired",
    "count_correct",
    "domain_summary",
    "expected_accuracy",
    "flops_per_example",
    "forgetting_lander_compat",
    "forgetting_mfcl_compat",
    "make_summary",
    "mean_interval",
    "parameters",
    "peak_rss_bytes",
    "spread",
]
