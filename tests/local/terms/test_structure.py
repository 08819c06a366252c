"""The structure term: its worked numbers, its derivatives, its surrogates, and what it must leave alone."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import ConfigError, Forward
from fedloom.core.payload import digest
from fedloom.local import SGD, LocalSGD
from fedloom.local.gate_fisher import gate_gradients
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.structure import FORMS, DomainProbe, StructureContrast, contrastive, detach, exact
from local.gated import examples, gated_context

pytestmark = pytest.mark.usefixtures("no_global_draws")
P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)
BOTH = torch.tensor([True, True])


def prototypes(domains: int, channels: int, seed: int = 0) -> torch.Tensor:
    rows = torch.rand(domains, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    return rows / rows.sum(1, keepdim=True)


def probe_of(ctx, batches, domains: int = 2, seed: int = 0, **given) -> DomainProbe:
    total = ctx.net.module.channels.total
    ones = torch.ones(total, dtype=torch.bool)
    fields = {"prototypes": prototypes(domains, total, seed), "valid": torch.ones(domains, dtype=torch.bool)}
    return DomainProbe(ctx, batches, **{**fields, "mask": ones, "kept": ones, **given})


def value(term: StructureContrast, probe: DomainProbe) -> torch.Tensor:
    out = {"logits": torch.zeros(1, 6, dtype=next(probe.ctx.net.module.parameters()).dtype)}
    return term({}, out, None, {"structure": probe}, {})


def test_the_worked_example():
    """With V = p1 the cosines are 1 and 0.551888, and L_con = 0.493985."""
    assert F.cosine_similarity(P[0], P[1], dim=0).item() == pytest.approx(0.551888, abs=5e-7)
    assert contrastive([P[0]], P, BOTH, [0]).item() == pytest.approx(0.493985, abs=5e-7)
    assert contrastive([P[0], P[1]], P, BOTH, [0, 1]).item() == pytest.approx(2 * 0.493985, abs=1e-6)


def test_its_range_for_four_domains_and_the_value_of_identical_prototypes():
    eye, valid = torch.eye(4, dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    assert contrastive([eye[0]], eye, valid, [0]).item() == pytest.approx(0.7437, abs=5e-5)
    others = torch.stack([eye[1], *[eye[0]] * 3])
    assert contrastive([eye[0]], others, valid, [0]).item() == pytest.approx(2.2143, abs=5e-5)
    same = torch.full((4, 3), 1 / 3, dtype=torch.float64)
    assert contrastive([P[0], P[1]], same, valid, [2, 1]).item() == pytest.approx(2 * math.log(4))


@settings(deadline=None)
@given(seed=st.integers(0, 500))
def test_every_summand_lies_in_the_range_whatever_the_scale(seed: int):
    rows = torch.rand(5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 4
    summand = contrastive([rows[4]], rows[:4], torch.ones(4, dtype=torch.bool), [seed % 4])
    assert 0.7436 <= summand.item() <= 2.2144
    small = contrastive([1e-30 * rows[4]], 1e-9 * rows[:4], torch.ones(4, dtype=torch.bool), [seed % 4])
    torch.testing.assert_close(small, summand)


def test_only_prototypes_that_exist_are_in_the_denominator():
    valid = torch.tensor([True, False, True])
    three = torch.stack([P[0], torch.full((3,), torch.nan, dtype=torch.float64), P[1]])
    assert contrastive([P[0], P[0], P[1]], three, valid, [0, 1, 2]).item() == pytest.approx(2 * 0.493985, abs=1e-6)
    assert contrastive([P[0]], three, torch.tensor([True, False, False]), [0]).item() == 0.0
    assert contrastive([P[0]], three, valid, [1]).item() == 0.0
    assert contrastive([], three, valid, []).item() == 0.0


def test_scores_of_zero_have_a_value_and_no_gradient():
    nothing = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    loss = contrastive([nothing], P, BOTH, [0])
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2)) and not nothing.grad.any()


@pytest.mark.parametrize("name", ["toy", "mlp", "small_cnn", "resnet8"])
def test_double_backward_agrees_with_finite_differences(name: str):
    ctx, batches = gated_context(name), examples(name, 24)
    params = dict(ctx.net.module.named_parameters())
    term = StructureContrast(1.0)
    value(term, probe_of(ctx, batches)).backward()
    rng = torch.Generator().manual_seed(0)
    checked = 0
    for param in [p for p in params.values() if p.grad is not None][:: max(1, len(params) // 8)]:
        along = torch.randn(param.shape, generator=rng, dtype=torch.float64)
        along /= along.norm()
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                param.add_(sign * 1e-6 * along)
            ends.append(value(term, probe_of(ctx, batches)).item())
            with torch.no_grad():
                param.sub_(sign * 1e-6 * along)
        slope = (ends[0] - ends[1]) / 2e-6
        assert (param.grad * along).sum().item() == pytest.approx(slope, rel=1e-4, abs=1e-8)
        checked += bool(param.grad.any())
    assert checked >= 4


@pytest.mark.parametrize("form", sorted(FORMS))
def test_the_forms_of_one_network_share_the_value_where_they_are_meant_to(form: str):
    """ "exact", "norm" and "detach" are V at the current weights; "bn" is V of the norms."""
    ctx, batches = gated_context("resnet8"), examples("resnet8", 24)
    loss = value(StructureContrast(2.0, FORMS[form]), probe_of(ctx, batches))
    reference = value(StructureContrast(2.0, detach), probe_of(ctx, batches))
    assert (loss.item() == pytest.approx(reference.item(), rel=1e-12)) is (form != "bn")
    assert loss.requires_grad is (form != "detach")


def test_the_norm_form_has_the_gradient_of_its_formula():
    """d/dW of F_j ||W_j||^2 / sg ||W_j||^2 at the current weights is 2 F_j W_j / ||W_j||^2."""
    ctx, batches = gated_context("toy"), examples("toy", 24)
    (batch,) = batches.epoch(batch_size=24, shuffle=False)
    weight = ctx.net.module.body.layers[0].weight
    ctx.net.train(False)
    along = torch.rand(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (FORMS["norm"](ctx, batch, "seen").mean(0) * along).sum().backward()
    fisher = detach(ctx, batch, "seen").mean(0)
    expected = 2 * (along * fisher / weight.detach().square().sum(1))[:, None] * weight.detach()
    torch.testing.assert_close(weight.grad, expected)


def test_the_bn_form_is_the_squared_weight_of_the_norm_times_its_fisher():
    ctx, batches = gated_context("resnet8"), examples("resnet8", 6)
    net = ctx.net.module.eval()
    (batch,) = batches.epoch(batch_size=6, shuffle=False)
    found = net.channels.split(FORMS["bn"](ctx, batch, "seen"))
    norms = {n: net.get_submodule(n) for group in net.channels.groups for n in group.norms}
    for example in range(6):
        logits = net(batch.x[example : example + 1])["logits"][:, :3]
        slopes = torch.autograd.grad(
            F.cross_entropy(logits, batch.y[example : example + 1]), [m.weight for m in norms.values()]
        )
        scores = {n: (m.weight * g).square() for (n, m), g in zip(norms.items(), slopes, strict=True)}
        for group, scored in zip(net.channels.groups, found, strict=True):
            torch.testing.assert_close(scored[example], sum(scores[n] for n in group.norms), rtol=1e-8, atol=1e-14)
    sum(part.sum() for part in found).backward()
    for group, scored in zip(net.channels.groups, found, strict=True):
        norm = norms[group.norms[0]]
        if len(group.norms) == 1:
            torch.testing.assert_close(norm.weight.grad, 2 * scored.detach().sum(0) / norm.weight.detach())
            assert norm.bias.grad is None


def test_channels_of_weight_zero_have_a_finite_gradient():
    for form in ("norm", "bn", "exact"):
        ctx, batches = gated_context("toy"), examples("toy", 24)
        net = ctx.net.module
        with torch.no_grad():
            net.body.layers[0].weight[3], net.body.layers[1].weight[3] = 0.0, 0.0
        value(StructureContrast(1.0, FORMS[form]), probe_of(ctx, batches)).backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        assert grads and all(g.isfinite().all() for g in grads) and any(g.any() for g in grads)


def train(form, *, weight=0.5, name="toy"):
    ctx = gated_context(name, torch.float32)
    batches = examples(name, 40, dtype=torch.float32)
    terms = (CrossEntropy(),) if form is None else (CrossEntropy(), StructureContrast(weight, form))
    loop = LocalSGD(
        SGD(lr=0.1, momentum=0.9, weight_decay=1e-4), epochs=1, batch_size=8 if name == "toy" else 20, terms=terms
    )
    state = ctx.init_state()
    end = loop(state, batches, ctx, ref={"structure": probe_of(ctx, batches)})
    return end


@pytest.mark.parametrize("name", ["toy", "resnet8"])
def test_a_constant_moves_no_bit_and_every_other_form_does(name: str):
    plain = train(None, name=name)
    reference = digest({"params": plain.params, "buffers": plain.buffers})
    results = {f: train(FORMS[f], name=name) for f in FORMS}
    digests = {f: digest({"params": end.params, "buffers": end.buffers}) for f, end in results.items()}
    assert digests.pop("detach") == reference
    assert len({reference, *digests.values()}) == 4
    for end in results.values():
        assert all(p.isfinite().all() for p in end.params.values()) and end.metrics["loss"] > plain.metrics["loss"]
    off = train(exact, weight=0.0, name=name)
    assert digest({"params": off.params, "buffers": off.buffers}) == reference


def test_training_with_the_term_lowers_it():
    """Without data terms: steps against L_con alone bring the scores of the domains nearer to their prototypes."""
    ctx, batches = gated_context("toy"), examples("toy", 40)
    before = value(StructureContrast(1.0), probe_of(ctx, batches, batch=20)).item()
    loop = LocalSGD(SGD(lr=0.2), epochs=3, batch_size=8, terms=(StructureContrast(1.0),))
    end = loop(ctx.init_state(), batches, ctx, ref={"structure": probe_of(ctx, batches, batch=20)})
    ctx.bind(end.params, end.buffers)
    assert value(StructureContrast(1.0), probe_of(ctx, batches, batch=20)).item() < before - 1e-3


def test_mode_buffers_and_the_training_stream_stay_as_they_were():
    ctx, batches = gated_context("resnet8"), examples("resnet8", 40)
    state = ctx.init_state()
    ctx.bind(state["params"], state["buffers"])
    order = [batch.index.tolist() for batch in examples("resnet8", 40).epoch(0, 8)]
    for training in (True, False):
        for form in FORMS.values():
            ctx.net.train(training)
            value(StructureContrast(1.0, form), probe_of(ctx, batches))
            assert ctx.net.module.training is training
    params, buffers = ctx.net.take()
    assert digest({"params": params, "buffers": buffers}) == digest(state)
    assert [batch.index.tolist() for batch in batches.epoch(0, 8)] == order
    assert batches.visits.count == 40 and batches.visits.passes == 8 * 32


def test_sub_batches_are_of_one_domain_each_and_drawn_anew_from_the_clients_own_stream():
    batches = examples("toy", 60, domains=3)
    first, again, other = (probe_of(gated_context("toy", client=c), batches, 3, batch=9) for c in (0, 0, 1))
    drawn = [first.draw() for _ in range(2)]
    for batch, counts in drawn:
        assert counts == [9, 9, 9]
        rows = batches.stored(torch.arange(60))[0]
        ids = [int((rows == x).all(1).nonzero()[0]) % 3 for x in batch.x]
        assert ids == [0] * 9 + [1] * 9 + [2] * 9
    assert not torch.equal(drawn[0][0].x, drawn[1][0].x)
    assert torch.equal(again.draw()[0].x, drawn[0][0].x) and not torch.equal(other.draw()[0].x, drawn[0][0].x)


def test_domains_with_few_examples_or_without_a_prototype_are_left_out():
    ctx, batches = gated_context("toy"), examples("toy", 60, domains=3)
    assert list(probe_of(ctx, batches, 3).places) == [0, 1, 2]
    rare = batches.subset(torch.cat([torch.arange(0, 60, 3), torch.arange(1, 22, 3), torch.arange(2, 24, 3)]))
    assert list(probe_of(ctx, rare, 3).places) == [0, 2], "7 examples are too few, 8 are not"
    assert list(probe_of(ctx, batches, 3, valid=torch.tensor([True, False, True])).places) == [0, 2]
    for nobody in ({"valid": torch.tensor([True, False, False])}, {"data": batches.part(0, 0)}):
        probe = DomainProbe(**{**_fields(ctx, batches), **nobody})
        assert value(StructureContrast(1.0), probe).item() == 0.0
    assert batches.visits.passes == 0


def _fields(ctx, batches):
    ones = torch.ones(8, dtype=torch.bool)
    valid = torch.ones(3, dtype=torch.bool)
    return {"ctx": ctx, "data": batches, "prototypes": prototypes(3, 8), "valid": valid, "mask": ones, "kept": ones}


def test_a_term_that_acts_in_every_third_step_counts_three_times():
    ctx, batches = gated_context("toy"), examples("toy", 40)
    probe, always = probe_of(ctx, batches), probe_of(ctx, batches)
    values = [value(StructureContrast(0.5, every=3), probe).item() for _ in range(6)]
    assert [v > 0 for v in values] == [True, False, False] * 2
    each = [value(StructureContrast(0.5), always).item() for _ in range(2)]
    assert [values[0], values[3]] == pytest.approx([3 * v for v in each])


def test_a_compact_network_is_compared_on_the_shared_channels_alone():
    """Private channels are there but not looked at: equal to the dense network with its other gates closed."""
    dense, batches = gated_context("resnet8"), examples("resnet8", 40)
    channels, rng = dense.net.module.channels, torch.Generator().manual_seed(5)
    kept = torch.rand(channels.total, generator=rng) < 0.7
    mask = kept & (torch.rand(channels.total, generator=rng) < 0.8)
    positions = channels.kept(kept)
    compact = dense.rebuild(channels.widths(positions))
    state = dense.init_state()
    compact.bind(*(channels.gather(state[field], positions) for field in ("params", "buffers")))
    probe = probe_of(compact, batches, mask=mask, kept=kept, prototypes=prototypes(2, channels.total))
    found = value(StructureContrast(1.0), probe)

    drawn, counts = probe_of(compact, batches, mask=mask, kept=kept, prototypes=prototypes(2, channels.total)).draw()
    dense.net.train(False)
    squares = gate_gradients(dense, drawn, kept.double()).square()
    signatures = [part.mean(0)[mask] for part in squares.split(counts)]
    expected = contrastive(signatures, prototypes(2, channels.total)[:, mask], BOTH, [0, 1])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    found.backward()
    grads = [p.grad for p in compact.net.module.parameters() if p.grad is not None]
    assert any(g.any() for g in grads) and all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("form", ["exact", "bn"])
def test_it_runs_under_checkpointing_and_autocast(form: str):
    found = {}
    for key, forward in {"checkpointing": Forward(grad_checkpointing=True), "bf16": Forward(precision="bf16")}.items():
        for run in (Forward(), forward):
            ctx = gated_context("resnet8", torch.float32, forward=run)
            loss = value(
                StructureContrast(1.0, FORMS[form]), probe_of(ctx, examples("resnet8", 16, dtype=torch.float32))
            )
            loss.backward()
            found[run] = torch.cat([p.grad.flatten() for p in ctx.net.module.parameters() if p.grad is not None])
        if key == "checkpointing":
            torch.testing.assert_close(found[forward], found[Forward()], rtol=1e-3, atol=1e-5)
        else:
            assert F.cosine_similarity(found[forward], found[Forward()], dim=0) > 0.9


def test_options_that_do_not_fit_are_refused_in_words():
    for weight in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="contrast_weight must be a finite number of at least 0"):
            StructureContrast(weight)
    with pytest.raises(ConfigError, match="contrast_every must be at least 1 step, got 0"):
        StructureContrast(1.0, every=0)
    with pytest.raises(ConfigError, match="label scope must be one of"):
        StructureContrast(1.0, scope="old")
    ctx, batches = gated_context("toy"), examples("toy", 40)
    with pytest.raises(ConfigError, match="contrast_batch must be at least 1, got 0"):
        probe_of(ctx, batches, batch=0)
    half = torch.arange(8) < 4
    with pytest.raises(ConfigError, match="4 channels are kept but the network has 8"):
        probe_of(ctx, batches, mask=half, kept=half)
    with pytest.raises(ConfigError, match="the mask must be part of what is kept"):
        probe_of(ctx, batches, kept=half)
    mlp = gated_context("mlp")
    with pytest.raises(ConfigError, match="contrast_mode 'bn' needs batch normalisation of every channel"):
        value(StructureContrast(1.0, FORMS["bn"]), probe_of(mlp, examples("mlp", 40)))
