"""From scores to choices: which experts a sample trains, which clients take part."""

from fedloom.select.fisher import FisherMap, fres
from fedloom.select.sampling import cohort_size, uniform_cohort
from fedloom.select.shapley import select_experts, shapley_values

__all__ = ["FisherMap", "cohort_size", "fres", "select_experts", "shapley_values", "uniform_cohort"]
