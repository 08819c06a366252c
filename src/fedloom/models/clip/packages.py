"""The optional package of vision-language models, imported where it is needed."""

from __future__ import annotations

import random
from typing import Any

from fedloom.core.errors import ConfigError


def open_clip() -> Any:
    """The module `open_clip`. Raises `ConfigError` that names the extra where it is missing."""
    drawn = random.getstate()
    try:
        import open_clip as module
    except ImportError as error:
        raise ConfigError(
            "CLIP models need the extra 'vision'; install it with: pip install 'fedloom[vision]'"
        ) from error
    finally:
        random.setstate(drawn)  # importing it draws from the global generator
    return module
