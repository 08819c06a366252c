"""What pruned methods tell of a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core import Payload
from fedloom.engine.files import load_payload
from fedloom.methods.channel_facts import (
    dealt,
    kept_channels,
    kept_weights,
    mask_overlaps,
    overlaps,
    prototype_cosines,
    scores_by_domain,
    weights_by_client,
    widths_kept,
)
from fedloom.models.channels import Channels, Group
from toys.federation import BlobSpec, experiment
from toys.running import start

TWO = Channels((Group("stem", 4, (), (), ()), Group("body", 2, (), (), ())), {})


def bits(text: str) -> torch.Tensor:
    return torch.tensor([c == "1" for c in text])


def test_the_share_that_is_kept_is_told_group_by_group():
    told = kept_channels(bits("100101"), TWO)
    assert told.rows == ["stem, 2 of 4", "body, 1 of 2"] and told.values == [[0.5], [0.5]]
    assert "keeps 3 of 6 channels" in told.note


def test_overlaps_are_jaccard_indices():
    told = overlaps("t", {3: bits("1100"), 5: bits("0111"), 9: bits("1100")}, "Note.")
    assert told.values == [[1.0, 0.25, 1.0], [0.25, 1.0, 0.25], [1.0, 0.25, 1.0]]
    assert told.rows == told.columns == [3, 5, 9]


def test_channels_of_their_own_are_told_only_where_some_client_has_any():
    mask = bits("1100")
    alone = {0: bits("1100"), 1: bits("0011")}
    assert [t.values[0][1] for t in mask_overlaps(alone, {0: mask, 1: mask}, mask)] == [0.0]
    of_masks, of_channels = mask_overlaps(alone, {0: mask, 1: bits("1111")}, mask)
    assert of_masks.values[0][1] == 0.0 and of_channels.values[0][1] == 0.5
    assert "0 to 2 channels" in of_channels.note
    assert mask_overlaps({0: mask}, {0: mask}, mask) == []


def test_cosines_are_told_of_domains_that_have_a_prototype():
    prototypes = torch.tensor([[0.6, 0.8, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    told = prototype_cosines(prototypes)
    assert told is not None and told.rows == told.columns == [0, 2]
    assert torch.allclose(torch.tensor(told.values), torch.tensor([[1.0, 0.8], [0.8, 1.0]]))
    assert prototype_cosines(prototypes[:2]) is None

    states = {4: {"scores": {"channels": torch.tensor([0.0, 2.0, 9.0])}}}
    told = scores_by_domain(states, prototypes, bits("110"))
    assert told is not None and (told.rows, told.columns) == ([4], [0, 2])
    assert torch.allclose(torch.tensor(told.values), torch.tensor([[0.8, 1.0]])), "what is pruned does not count"
    assert scores_by_domain({}, prototypes, bits("110")) is None
    assert scores_by_domain(states, torch.zeros(2, 3), bits("110")) is None


def told_by(path: Path, **options: Any) -> tuple[dict[str, Any], Payload]:
    whole = experiment("fedloom.methods.fedfip:fedfip", spec=BlobSpec(residual=True), cohort=1.0, options=options)
    start(path, whole)
    file = path / "facts.json"
    tables = json.loads(file.read_text())["tables"] if file.exists() else []
    server = load_payload(next((path / "checkpoints").glob("stage0003-*")) / "server.safetensors")
    return {table["title"]: table for table in tables}, server


def test_fedfip_tells_of_its_mask_its_clients_and_its_domains(tmp_path: Path):
    tables, server = told_by(tmp_path / "run", keep=0.5, react_max=0.5, reactivation_threshold=0.0)
    assert list(tables) == [
        "Channels kept",
        "Overlap of the clients' masks",
        "Overlap of the clients' channels",
        "Cosine of the domains' prototypes",
        "Cosine of the clients' scores with the domains' prototypes",
    ]
    mask = server["mask"]["channels"]
    shares = [value for (value,) in tables["Channels kept"]["values"]]
    assert shares == [float(part.double().mean()) for part in mask.split([24, 8])]
    assert tables["Overlap of the clients' masks"]["rows"] == [0, 1, 2, 3]
    for title, table in tables.items():
        if table["axes"][0] == table["axes"][1]:
            values = torch.tensor(table["values"])
            assert torch.allclose(values, values.T) and torch.allclose(values.diagonal(), torch.ones(len(values))), (
                title
            )
    p, q = server["prototypes"]["values"].double()
    assert tables["Cosine of the domains' prototypes"]["values"][0][1] == pytest.approx(
        float(torch.cosine_similarity(p, q, 0)), abs=1e-6
    )


def test_fedfip_without_pruning_tells_of_domains_alone_and_without_both_of_nothing(tmp_path: Path):
    assert list(told_by(tmp_path / "whole", keep=1.0)[0]) == ["Cosine of the domains' prototypes"]
    assert told_by(tmp_path / "plain", keep=1.0, contrast_weight=0.0)[0] == {}


def test_widths_are_told_as_shares_of_every_group():
    told = widths_kept("t", "rate", {"1": (4, 2), "0.3": (3, 1), "0.1": (1, 1)}, TWO, "Note.")
    assert told.columns == ["stem of 4", "body of 2"] and told.rows == ["1", "0.3", "0.1"]
    assert told.values == [[1.0, 1.0], [0.75, 0.5], [0.25, 0.5]]
    assert (told.title, told.axes, told.note) == ("t", ("rate", "group"), "Note.")


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (("net.stem", "net.body.one"), ["stem of 4", "body.one of 2"]),
        (("net.stem", "body.one"), ["net.stem of 4", "body.one of 2"]),
        (("net.stem", "net"), ["net.stem of 4", "net of 2"]),
        (("net.stem",), ["stem of 4"]),
        (("stem",), ["stem of 4"]),
    ],
)
def test_columns_do_not_name_the_module_that_holds_every_group(names: tuple[str, ...], columns: list[str]):
    groups = tuple(Group(name, size, (), (), ()) for name, size in zip(names, (4, 2), strict=False))
    assert widths_kept("t", "rate", {"1": (4, 2)[: len(names)]}, Channels(groups, {}), "").columns == columns


def test_what_belongs_to_a_rate_is_dealt_by_client_id():
    whole = experiment("fedloom.methods.fedavg:fedavg", num_clients=5)
    ctx = whole.context(whole.net(), 0)
    assert dealt({0.5: "half", 1.0: "all"}, (1.0, 0.5, 0.5), ctx) == {
        0: "all",
        1: "half",
        2: "half",
        3: "all",
        4: "half",
    }


def test_the_share_of_weights_that_is_kept_is_told_tensor_by_tensor():
    told = kept_weights({"a": bits("1011").view(2, 2), "b": bits("00100")})
    assert told.rows == ["a, 3 of 4", "b, 1 of 5"] and told.values == [[0.75], [0.2]]
    assert told.note == "The masks keep 4 of the 9 weights that may be pruned."


def test_a_client_without_a_share_of_a_layer_keeps_all_of_it():
    told = weights_by_client({0: {}, 3: {"a.weight": 0.25}, 4: {"a.weight": 0.5, "b.weight": 2 / 3}}, "Note.")
    assert told.rows == [0, 3, 4] and told.columns == ["a", "b"]
    assert told.values == [[1.0, 1.0], [0.25, 1.0], [0.5, 0.666667]]
