"""Networks: backbones by name, and the fixed-width classifier on top of one."""

from fedloom.models.heads import Classifier
from fedloom.models.registry import backbone, names
from fedloom.models.spec import NetworkSpec

__all__ = ["Classifier", "NetworkSpec", "backbone", "names"]
