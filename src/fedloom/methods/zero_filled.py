"""Averages of pruned models in which what a client has pruned counts as 0: DapperFL as its public code carries it out.

Source: the code of Jia et al., "DapperFL" (NeurIPS 2024), github.com/jyzgh/DapperFL. It differs from the paper: the
fusion waits for modules that are pruned, which none is when it is reached; the server adds its values to a tensor that
is then computed anew as mask times weight, so that entries are not recovered; every layer is masked for itself
(`fedloom.select.layerwise`); the regulariser is the norm of the features, not its square, and acts in the first epoch
too. Kept from the paper's form: optimiser state is fresh after the pruning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedloom.core import Batches, ClientId, Context, Payload, Table, Update
from fedloom.local.continued import Continued
from fedloom.local.transforms.masked import MaskedGradients
from fedloom.methods.channel_facts import dealt, weights_by_client
from fedloom.methods.fedavg import FedAvg
from fedloom.select.layerwise import layer_masks
from fedloom.select.rates import fixed


@dataclass(frozen=True)
class ZeroFilled(FedAvg):
    """FedAvg of dense models with zeros. ratios: removed shares, dealt by client id, one after the other."""

    ratios: tuple[float, ...] = (0.0,)

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """One epoch, masks, and the other epochs with what they leave."""
        epochs = self.local.epochs
        first = replace(self.local, epochs=min(epochs, 1))(down, data, ctx)
        masks = layer_masks(ctx.net.module, first.params, fixed(self.ratios, ctx))
        params = {name: torch.where(masks[name], p, 0) if name in masks else p for name, p in first.params.items()}
        rest = replace(self.local, epochs=max(0, epochs - 1), transforms=(*self.local.transforms, MaskedGradients()))
        part = {"params": params, "buffers": first.buffers}
        end = rest(part, Continued(data, 1), ctx, ref={"masks": masks})
        up = {"params": end.params, "buffers": end.buffers}
        return Update(state, up, metrics={**first.metrics, **end.metrics})

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """How many weights each client keeps, which its ratio tells whatever they are; nothing where none prunes."""
        shares = {ratio: self.shares(server, ratio, ctx) for ratio in set(self.ratios)}
        if not any(shares.values()):
            return []
        note = "Shares that a client's ratio leaves, of the layers that lose any; their choice is made in every round."
        return [weights_by_client(dealt(shares, self.ratios, ctx), note)]

    def shares(self, server: Payload, ratio: float, ctx: Context) -> dict[str, float]:
        """Name of a weight -> the share of it that stays; weights that lose nothing are not named."""
        masks = layer_masks(ctx.net.module, server["params"], ratio)
        return {name: int(mask.sum()) / mask.numel() for name, mask in masks.items()}
