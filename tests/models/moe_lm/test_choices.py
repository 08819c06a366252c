"""Multiple choice against likelihoods computed token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.core import ConfigError
from toys.language_models import DECODERS, VOCAB, choice_spec, questions, text_spec


def brute_force(module: Any, x: Any) -> torch.Tensor:
    """Sum of log p over each option's tokens, one row at a time and without padding."""
    found = torch.zeros(x["input_ids"].shape[:2])
    for b in range(found.shape[0]):
        for c in range(found.shape[1]):
            length = int(x["attention_mask"][b, c].sum())
            ids = x["input_ids"][b, c, :length]
            logits = module.backbone.body(input_ids=ids[None]).logits[0]
            logp = logits.log_softmax(1)
            for place in range(1, length):
                if x["scored"][b, c, place]:
                    found[b, c] += logp[place - 1, ids[place]]
    return found


@pytest.mark.parametrize("architecture", DECODERS)
def test_logits_are_log_likelihoods(architecture: str) -> None:
    module, x = choice_spec(architecture).classifier().eval(), questions()
    with torch.no_grad():
        out, expected = module(x), brute_force(module, x)
    torch.testing.assert_close(out["logits"], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out["choice_nll"], -expected, atol=1e-5, rtol=1e-5)
    tokens = (x["scored"] > 0).sum(2).float()
    assert torch.equal(out["choice_tokens"], tokens) and torch.equal(out["choice_characters"], 4 * tokens)


def test_scores_divide_by_what_they_are_named_after() -> None:
    x = questions()
    outs = {}
    for score in ("sum", "tokens", "characters"):
        with torch.no_grad():
            outs[score] = choice_spec("mixtral", score=score).classifier().eval()(x)
    nll, tokens = outs["sum"]["choice_nll"], outs["sum"]["choice_tokens"]
    assert torch.equal(outs["sum"]["logits"], -nll)
    assert torch.equal(outs["tokens"]["logits"], -nll / tokens)
    assert torch.equal(outs["characters"]["logits"], -nll / (4 * tokens))


def test_measures_are_sums_and_counts() -> None:
    module = choice_spec("mixtral").classifier()
    out = {
        "choice_nll": torch.tensor([[4.0, 2.0, 9.0], [3.0, 8.0, 1.0]]),
        "choice_tokens": torch.tensor([[2.0, 1.0, 3.0], [1.0, 4.0, 1.0]]),
        "choice_characters": torch.tensor([[10.0, 2.0, 9.0], [2.0, 40.0, 4.0]]),
    }
    # per character 0.4, 1, 1 and 1.5, 0.2, 0.25; by the sum the options 1 and 2 would win
    measures = module.measures(out, torch.tensor([0, 2]))
    assert measures == {"accuracy_norm": (1.0, 2.0), "nll": (5.0, 3.0)}


def test_questions_padded_longer_score_the_same() -> None:
    module, x = text_spec("mixtral", shape=(2, 4, 20), classes=4).classifier().eval(), questions()
    longer = {n: torch.cat([t, torch.zeros(3, 4, 8, dtype=t.dtype)], 2) for n, t in x.items()}
    with torch.no_grad():
        torch.testing.assert_close(module(longer)["logits"], module(x)["logits"])


def test_a_question_without_scored_tokens_gets_zeros() -> None:
    module, x = choice_spec("mixtral").classifier(), questions()
    out = module({**x, "scored": torch.zeros_like(x["scored"])})
    assert not out["logits"].any() and all(torch.isfinite(t).all() for t in out.values())


def test_an_encoder_scores_each_option_by_its_own_features() -> None:
    module, x = choice_spec("switch_encoder").classifier().eval(), questions()
    with torch.no_grad():
        out = module(x)
        for c in range(4):
            one = {n: x[n][:, c] for n in ("input_ids", "attention_mask")}
            torch.testing.assert_close(module.head(module.backbone(one))[:, 0], out["logits"][:, c])
    assert not hasattr(module, "measures") and out["routing"].shape == (2, 144, 4)


def test_options_in_another_order_give_logits_in_that_order() -> None:
    order = [2, 0, 3, 1]
    for architecture in ("switch_encoder", "olmoe"):
        module, x = choice_spec(architecture).classifier().eval(), questions()
        with torch.no_grad():
            moved = module({n: t[:, order] for n, t in x.items()})["logits"]
            torch.testing.assert_close(moved, module(x)["logits"][:, order])


def test_a_choice_is_learnt() -> None:
    module, x, y = choice_spec("qwen3_moe").classifier(), questions(8), torch.arange(8) % 4
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    losses = []
    for _ in range(25):
        loss = torch.nn.functional.cross_entropy(module(x)["logits"], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_methods_with_heads_of_their_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="scores the options of a question"):
        choice_spec("mixtral").backbone()


def test_the_vocabulary_bounds_the_ids() -> None:
    assert choice_spec("mixtral").classifier().backbone.body.get_output_embeddings().weight.shape == (VOCAB, 16)
