"""The optional packages of language models, imported where they are needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedloom.core.errors import ConfigError


def library() -> Any:
    """The package `transformers`; `ConfigError` where it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("language models need transformers: pip install 'fedloom[llm]'") from error
    return transformers


def adapters() -> Any:
    """The package `peft`; `ConfigError` where it is missing."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError("model.options.lora needs peft: pip install 'fedloom[llm]'") from error
    return peft


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the block `transformers` prints no bars and reports nothing below an error."""
    logger, told = logging.getLogger("transformers"), library().utils.logging
    level, bars = logger.level, told.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    told.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            told.enable_progress_bar()
