"""All aggregation arithmetic: trees and weights in, one tree out. Pure."""

from fedloom.merge.buffers import BUFFER_POLICIES, buffer_policy, pooled_moments
from fedloom.merge.by_index import indexed_mean, take_part
from fedloom.merge.experts import expertwise_mean
from fedloom.merge.masked import masked_mean
from fedloom.merge.mean import RULES, replies_mean, reply_trees, weighted_mean
from fedloom.merge.parts import ByPrefix, Merge, Selected
from fedloom.merge.prototypes import merge_prototypes
from fedloom.merge.server_opt import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerStep

__all__ = [
    "BUFFER_POLICIES",
    "RULES",
    "ByPrefix",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "Merge",
    "Selected",
    "ServerStep",
    "buffer_policy",
    "expertwise_mean",
    "indexed_mean",
    "masked_mean",
    "merge_prototypes",
    "pooled_moments",
    "replies_mean",
    "reply_trees",
    "take_part",
    "weighted_mean",
]
