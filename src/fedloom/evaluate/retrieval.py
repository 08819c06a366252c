"""Retrieval between pictures and class texts over a whole gallery: recall at 1, both ways.

The sources of Fed-Duet do not say what their gallery is. Here it is that of the classes seen: every test picture of
theirs, and one text per class.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Retrieval:
    """image_to_text: share of the pictures whose nearest text is that of their class. text_to_image: share of the texts
    whose nearest picture is of their class. None without pictures. pictures, texts: how many there are.
    """

    image_to_text: float | None
    text_to_image: float | None
    pictures: int
    texts: int


def retrieval(feats: Tensor, labels: Tensor, texts: Tensor, classes: Tensor) -> Retrieval:
    """Recall at 1 by cosine.

    feats: [n, d]. labels: int64 [n], each one of `classes`. texts: [C, d], features of the texts of `classes`, int64
    [C]. Features need not have length 1. Of equally near ones the first counts. Raises `ValueError` for features of
    different widths, and for a label without a text.
    """
    if feats.shape[1:] != texts.shape[1:]:
        raise ValueError(f"pictures have features of {list(feats.shape[1:])}, texts of {list(texts.shape[1:])}")
    strangers = labels[~torch.isin(labels, classes)]
    if len(strangers):
        raise ValueError(f"the gallery holds a picture of class {int(strangers[0])}, which has no text")
    if not len(feats) or not len(texts):
        return Retrieval(None, None, len(feats), len(texts))
    cosines = F.normalize(feats.double(), dim=-1) @ F.normalize(texts.double(), dim=-1).T
    right_texts = classes[cosines.argmax(1)] == labels
    right_pictures = labels[cosines.argmax(0)] == classes
    return Retrieval(
        image_to_text=int(right_texts.sum()) / len(feats),
        text_to_image=int(right_pictures.sum()) / len(texts),
        pictures=len(feats),
        texts=len(texts),
    )
