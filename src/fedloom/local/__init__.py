"""What a client does to parameters: one training loop and its parts."""

from fedloom.local.optim import SGD, AdamW, Optimizer, Schedule
from fedloom.local.sgd import Group, LocalSGD, Phase, Trained

__all__ = ["SGD", "AdamW", "Group", "LocalSGD", "Optimizer", "Phase", "Schedule", "Trained"]
