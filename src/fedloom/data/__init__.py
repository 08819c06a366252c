"""Sources, partitions, streams and the data plan."""

from fedloom.data.arrays import from_arrays
from fedloom.data.catalogue import catalogue
from fedloom.data.plan import Plan, make_plan
from fedloom.data.source import Source
from fedloom.data.sources import load_source, store_source

__all__ = ["Plan", "Source", "catalogue", "from_arrays", "load_source", "make_plan", "store_source"]
