"""Networks that tell their routing: see `fedloom.core.moe` for what they return.

Forward hooks on the routers collect what each saw and decided; a hook on the whole network adds it to the outputs.
Nothing is collected while a backward pass computes activations again. A router whose logits are not finite still
chooses experts, and the network's outputs are NaN: so is the loss, and the update of such a client is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedloom.core.errors import ConfigError
from fedloom.core.moe import MoELayer
from fedloom.models.moe_lm.layers import active_parameters, gate_of

CHOICE_BIAS = "e_score_correction_bias"
OUT_OF_REACH = 1e3  # finite: groups of experts are compared by sums, in which one allowed expert must still count


def routed(module: Any, aux: float = 0.0) -> Any:
    """The same module, whose outputs also hold its routing; it returns logits or a mapping that holds "logits".

    aux: above 0 it also returns "aux_loss", aux times `load_balance`.

    It gets `restricted(allowed)`, a context manager: inside, with allowed bool [L, E], the logits of other experts are
    -inf before the softmax, so that probabilities are over the allowed ones and no token reaches the others.
    """
    recorder = _Recorder(module.moe_layers, aux)
    module.records_inputs = False
    module.active_parameters = partial(active_parameters, module)
    module.restricted = partial(_restricted, recorder)
    module.register_forward_pre_hook(recorder.begin)
    for index, layer in enumerate(module.moe_layers):
        gate: Any = gate_of(module.get_submodule(layer.name))
        gate.register_forward_pre_hook(partial(recorder.enter, index))
        gate.register_forward_hook(partial(recorder.leave, index), always_call=True)
    module.register_forward_hook(recorder.finish, with_kwargs=True)
    return module


class _Recorder:
    """What the gates of one forward pass did. allowed: bool [L, E], None for all."""

    def __init__(self, layers: Sequence[MoELayer], aux: float):
        self.layers, self.aux = layers, aux
        self.allowed: Tensor | None = None
        self.open = self.inputs = False
        self.hidden: list[Tensor] = []
        self.outputs: list[Any] = []
        self.mode: _Masked | None = None

    def begin(self, module: Any, args: Any) -> None:
        self.open, self.inputs, self.hidden, self.outputs = True, module.records_inputs, [], []

    def enter(self, index: int, gate: nn.Module, args: Any) -> None:
        if self.open and self.inputs:
            hidden = args[0].detach()
            # a router may add noise to its input in place, and the experts see that too
            self.hidden.append(hidden.reshape(-1, hidden.shape[-1]).clone())
        if self.allowed is not None:
            self.mode = _Masked(gate, self.allowed[index])
            self.mode.__enter__()

    def leave(self, index: int, gate: nn.Module, args: Any, output: Any) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.mode = None
        if self.open and output is not None:
            self.outputs.append(output)  # nothing is computed here, where checkpointing would have to repeat it

    def finish(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        self.open = False
        found = [
            decisions(out, layer, self._allowed(k))
            for k, (out, layer) in enumerate(zip(self.outputs, self.layers, strict=False))
        ]
        if len(found) != len(self.layers):
            raise ConfigError(
                f"{len(found)} of the network's {len(self.layers)} mixture-of-experts layers ran in a forward pass; "
                "each must run once"
            )
        sizes = sorted({len(layer["routing"]) for layer in found})
        if len(sizes) > 1:
            raise ConfigError(
                f"the network's mixture-of-experts layers see {' and '.join(map(str, sizes))} tokens of one batch "
                "(encoder and decoder?); use one of the two"
            )
        stacked = {name: torch.stack([layer[name] for layer in found]) for name in found[0]}
        if self.hidden:
            stacked["expert_inputs"] = torch.stack(self.hidden)
        self.outputs, self.hidden = [], []
        x = args[0] if args else next(iter(kwargs.values()))
        mask = x["attention_mask"].reshape(-1).bool() if isinstance(x, Mapping) and "attention_mask" in x else None
        whole = torch.ones(sizes[0], dtype=torch.bool, device=stacked["routing"].device)
        mask = whole if mask is None else mask.to(whole.device)
        if self.aux:
            stacked["aux_loss"] = self.aux * load_balance(stacked["routing"], stacked["selected"], mask)
        output = {"logits": output} if isinstance(output, Tensor) else output
        return {**output, **stacked, "token_mask": mask}

    def _allowed(self, index: int) -> Tensor | None:
        return None if self.allowed is None else self.allowed[index]


def decisions(output: Any, layer: MoELayer, allowed: Tensor | None = None) -> dict[str, Tensor]:
    """ "routing", "selected" and "dispatched" [T, E] of what a router returned.

    Two forms are known: (logits, weights, expert ids [T, k]), and that of Switch Transformers, (one-hot dispatch after
    the capacity [.., E], largest probability, logits [.., E]).
    """
    experts = layer.num_experts
    first, _, last = output if isinstance(output, tuple) and len(output) == 3 else (None, None, None)
    if _has_width(first, experts) and first.is_floating_point() and last.dtype == torch.int64:
        logits = first.reshape(-1, experts)
        selected = F.one_hot(last.reshape(-1, last.shape[-1]), experts).sum(1).bool()
        dispatched = selected
    elif _has_width(last, experts) and last.is_floating_point():
        logits = last.reshape(-1, experts)
        selected = F.one_hot(logits.argmax(1), experts).bool()
        dispatched = first.reshape(-1, experts).bool()
    else:
        raise ConfigError(f"the router of '{layer.name}' returns values of an unknown form; it is not supported")
    if allowed is not None:
        selected, dispatched = selected & allowed, dispatched & allowed
    return {"routing": log_probabilities(logits, layer.score), "selected": selected, "dispatched": dispatched}


def _has_width(value: Any, experts: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] == experts


def log_probabilities(logits: Tensor, score: str) -> Tensor:
    """log p [T, E] in fp32: log-softmax, or the log of sigmoid scores divided by their sum."""
    logits = logits.float()
    if score == "softmax":
        return F.log_softmax(logits, 1)
    scores = F.logsigmoid(logits)
    return scores - scores.logsumexp(1, keepdim=True)


def load_balance(routing: Tensor, selected: Tensor, mask: Tensor) -> Tensor:
    """E sum_e f_e P_e, the mean over layers: top-k where all experts share alike, more where they do not.

    f_e: the share of tokens that chose expert e, without gradient. P_e: its mean probability. Source: Fedus et al.,
    eqs. (4)-(6), and for more than one expert per token the same sum. Padding counts in neither. routing, selected:
    [L, T, E]; mask: [T].
    """
    weight = mask.to(routing.dtype).unsqueeze(1) / mask.sum().clamp(min=1)
    share, probability = ((values * weight).sum(1) for values in (selected.to(routing.dtype), routing.exp()))
    return routing.shape[2] * (share * probability).sum(1).mean()


@contextmanager
def _restricted(recorder: _Recorder, allowed: Tensor) -> Iterator[None]:
    shape = (len(recorder.layers), recorder.layers[0].num_experts)
    if tuple(allowed.shape) != shape or not bool(allowed.any(1).all()):
        raise ConfigError(f"the allowed experts must be bool {list(shape)} with one per layer at least")
    before, recorder.allowed = recorder.allowed, allowed
    try:
        yield
    finally:
        recorder.allowed = before


class _Masked(TorchFunctionMode):
    """Inside a router, its linear layer gives -inf for experts that are not allowed.

    Every known router makes its logits by one call of `torch.nn.functional.linear` and hides them inside its forward.
    Where a bias is added for the choice alone, it is lowered for them, or they would still be chosen.
    """

    def __init__(self, gate: nn.Module, allowed: Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate, self.allowed = gate, allowed
        self.bias = gate._buffers.get(CHOICE_BIAS)

    def __enter__(self) -> Any:
        if self.bias is not None:
            outside = ~self.allowed.to(self.bias.device)
            self.gate._buffers[CHOICE_BIAS] = self.bias - OUT_OF_REACH * outside
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            self.gate._buffers[CHOICE_BIAS] = self.bias

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is F.linear:
            return found.masked_fill(~self.allowed.to(found.device), -torch.inf)
        return found
