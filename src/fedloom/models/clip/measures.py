"""How well pictures and class texts agree in the joint space, beside accuracy.

Alignment is undefined in the sources of Fed-Duet. Here it is a margin, mean_b cos(f_b, t_{y_b}) - mean_{b, c != y_b}
cos(f_b, t_c) over the shown classes: the cosine of matched pairs alone says little, since all features of a CLIP lie
in a narrow cone.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def agreement(feats: Tensor, texts: Tensor, shown: Tensor, y: Tensor) -> dict[str, tuple[float, float]]:
    """(sum, count) of "alignment" and "matched_cosine" over the pictures whose class is shown.

    feats: [batch, d]. texts: [shown, d], features of the classes `shown`, int64 [shown]. y: class ids [batch]. Features
    need not have length 1. With a single class there is no other text, and the count of "alignment" is 0.
    """
    own = y[:, None] == shown
    known = own.any(1)
    own = own[known]
    cosines = F.normalize(feats[known].double(), dim=-1) @ F.normalize(texts.double(), dim=-1).T
    matched = (cosines * own).sum(1)
    others = len(shown) - 1
    margin = matched - (cosines * ~own).sum(1) / max(1, others)
    count = float(len(matched))
    return {
        "alignment": (float(margin.sum()), count) if others else (0.0, 0.0),
        "matched_cosine": (float(matched.sum()), count),
    }
