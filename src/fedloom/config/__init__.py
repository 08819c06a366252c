"""The configuration tree: typed sections, layers of overrides, sentences for what is wrong, one hash."""

from fedloom.config.digest import config_hash
from fedloom.config.layers import overrides, read_yaml, recipe_names
from fedloom.config.resolve import resolve, resolve_source
from fedloom.config.sections import Config

__all__ = ["Config", "config_hash", "overrides", "read_yaml", "recipe_names", "resolve", "resolve_source"]
