"""The Hugging Face hub: whether it can be reached, without its libraries' own lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 5.0  # seconds for the first word of the hub


@contextmanager
def offline_unless_reached() -> Iterator[None]:
    """One try to reach the hub; without it only the cache is read, instead of minutes of retries."""
    import datasets
    import huggingface_hub

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    away = any(before)
    if not away:
        try:
            huggingface_hub.utils.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=PATIENCE)
        except Exception:  # the library's transport raises kinds of its own
            away = True
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = away
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Keep the libraries' lines about retries to themselves: what failed in the end is told in our sentence."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
