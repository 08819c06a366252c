"""The contract between methods and engines. Imports torch only."""

from fedloom.core.batches import Batch, Batches
from fedloom.core.context import ClientId, Context, Forward, Net, Stage
from fedloom.core.errors import (
    CheckpointError,
    ClientError,
    ConfigError,
    DataError,
    FedloomError,
    Interrupted,
    PayloadError,
    RunError,
)
from fedloom.core.method import DataPlan, Exchange, Method, ModelSpec, Reply, Trip, Update
from fedloom.core.payload import Payload
from fedloom.core.table import Table

__all__ = [
    "Batch",
    "Batches",
    "CheckpointError",
    "ClientError",
    "ClientId",
    "ConfigError",
    "Context",
    "DataError",
    "DataPlan",
    "Exchange",
    "FedloomError",
    "Forward",
    "Interrupted",
    "Method",
    "ModelSpec",
    "Net",
    "Payload",
    "PayloadError",
    "Reply",
    "RunError",
    "Stage",
    "Table",
    "Trip",
    "Update",
]
