"""All aggregation arithmetic: trees and weights in, one tree out. Pure."""

from fedloom.merge.buffers import BUFFER_POLICIES, buffer_policy, pooled_moments
from fedloom.merge.by_index import indexed_mean, take_part
from fedloom.merge.experts import expertwise_mean
from fedloom.merge.masked import masked_mean
from fedloom.merge.matching import match, pooled_centroids
from fedloom.merge.mean import RULES, replies_mean, reply_trees, weighted_mean
from fedloom.merge.parts import ByPrefix, Merge, Selected
from fedloom.merge.prototypes import merge_prototypes
from fedloom.merge.semantic import Region, SemanticMerge, experts_by_shares
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
    "Region",
    "Selected",
    "SemanticMerge",
    "ServerStep",
    "buffer_policy",
    "experts_by_shares",
    "expertwise_mean",
    "indexed_mean",
    "masked_mean",
    "match",
    "merge_prototypes",
    "pooled_centroids",
    "pooled_moments",
    "replies_mean",
    "reply_trees",
    "take_part",
    "weighted_mean",
]
