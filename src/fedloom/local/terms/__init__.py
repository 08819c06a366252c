"""Loss terms, one per file."""

from fedloom.local.terms.cross_entropy import CrossEntropy
from fedloom.local.terms.distillation import Distillation, TeacherLogits
from fedloom.local.terms.proximal import Proximal

__all__ = ["CrossEntropy", "Distillation", "Proximal", "TeacherLogits"]
