"""What the recipes promise in their headers; minutes of training, so run with -m slow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import api, compare, methods
from fedloom.build import build
from fedloom.config import recipe_names, resolve, resolve_source
from fedloom.core.errors import Interrupted
from fedloom.core.seeds import generator
from fedloom.data import load_source
from fedloom.engine.experiment import Observer
from toys.federation import method_of

DATA = Path(__file__).parents[2].parent / "shared" / "data"
METHODS = ("fedavg", "fedprox", "fedfmx")


class FirstStage(Observer):
    """Keeps the row of the first stage and ends the run there."""

    def stage_done(self, row: Mapping[str, Any]) -> None:
        self.row = row
        raise Interrupted("the first stage is all that is asked for")


def first_stage(recipe: str, method: str, folder: Path, **layer: Any) -> Mapping[str, Any]:
    watch = FirstStage()
    with pytest.raises(Interrupted):
        api.run(recipe, method=method, out=folder, observers=[watch], **layer)
    return watch.row


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_quickstart_learns_its_first_task(method: str, tmp_path: Path) -> None:
    row = first_stage("quickstart", method, tmp_path / "run")
    assert row["accuracy/current"] > 0.75  # one of two classes by chance; one of ten over the whole head


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "uoft-cs" / "cifar100").is_dir(), reason="the CIFAR-100 mirror is not here")
@pytest.mark.parametrize("method", METHODS)
def test_cifar100_small_learns_its_first_task(method: str, tmp_path: Path) -> None:
    row = first_stage("cifar100-fcil-small", method, tmp_path / "run", data={"root": str(DATA)})
    assert row["accuracy/current"] > 2 * 0.1


SMALL = {
    "quickstart": (),
    "quickstart-domains": (),
    "cifar100-fcil-small": ("uoft-cs/cifar100",),
    "pacs-small": ("flwrlabs/pacs",),
    "digits-domains-small": ("ylecun/mnist", "flwrlabs/usps", "Mike0307/MNIST-M"),
    "agnews-moe-small": ("fancyzhx/ag_news",),
    "mmlu-moe-small": ("cais/mmlu",),
    "hellaswag-moe-small": ("Rowan/hellaswag",),
    "cifar100-clip-small": ("uoft-cs/cifar100",),
    "pacs-clip-small": ("flwrlabs/pacs",),
}


def root_of(recipe: str) -> Path | None:
    """The data folder that a recipe needs; skips where it is not here."""
    if not all((DATA / name).is_dir() for name in SMALL[recipe]):
        pytest.skip("the mirrors that the recipe needs are not here")
    return DATA if SMALL[recipe] else None


@pytest.mark.parametrize("recipe", SMALL)
def test_recipes_use_all_data_and_take_ten_steps(recipe: str) -> None:
    root = root_of(recipe)
    layer = {} if root is None else {"data": {"root": str(root)}}
    made = build(resolve(resolve_source(recipe)[1], layer))
    plan, training = made.experiment.plan, made.config.training
    sizes = [plan.size(c, s) for s in range(plan.num_stages) for c in plan.participants(s)]
    assert sum(sizes) == len(made.source.y_train)
    mean = sum(sizes) / len(sizes)
    assert mean * training.local_epochs / training.batch_size >= 10
    assert training.rounds >= 5
    largest = 3_000_000 if recipe.endswith(("moe-small", "clip-small")) else 100_000
    assert sum(p.numel() for p in made.experiment.spec.classifier().parameters()) <= largest


IMAGES = [name for name in methods.names() if not method_of(f"fedloom.methods.{name}:{name}").needs_experts]
SHOWN = [
    *(("quickstart-domains", name, 0.5) for name in IMAGES),
    ("digits-domains-small", "fedavg", 0.5),
    ("pacs-small", "fedavg", 1.5 / 7),
    ("pacs-small", None, 1.5 / 7),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "method", "least"), SHOWN)
def test_recipes_with_domains_are_learnt_in_every_domain(
    recipe: str, method: str | None, least: float, tmp_path: Path
) -> None:
    root = root_of(recipe)
    found = api.run(recipe, method=method, out=tmp_path / "run", **{"data.root": str(root) if root else None}).summary
    views = [found["domain_accuracy"], found["personal_domain_accuracy"]]
    assert max(min(view.values()) for view in views) > least
    assert found["failed_clients"] == found["rejected_updates"] == 0


TABLE_1 = [name for name in recipe_names() if name.startswith("fedfmx/table1-")]


def few_images(hub: str, size: int | None) -> tuple[Any, ...]:
    """100 train and 10 test images of two classes of the mirror, grown to `size`; noise where there is no mirror."""
    shown = 32 if size is None else size
    if not (DATA / hub).is_dir():
        x = torch.randint(0, 256, (110, 3, shown, shown), dtype=torch.uint8, generator=generator("images"))
    else:
        source = load_source(hub, root=DATA)
        rows = torch.cat([(source.y_train == c).nonzero()[:55, 0] for c in (0, 1)])
        x = torch.as_tensor(source.x_train[rows]).float()
        x = torch.nn.functional.interpolate(x, size=(shown, shown)).to(torch.uint8)
    y = torch.arange(2).repeat_interleave(55)
    test = torch.arange(110) % 11 == 0
    return x[~test], y[~test], x[test], y[test]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TABLE_1)
def test_table_1_carries_out_a_round_on_a_few_images(recipe: str, tmp_path: Path) -> None:
    config = resolve(resolve_source(recipe)[1])
    if config.model.name.startswith("timm/"):
        pytest.importorskip("timm")
    changes = {"data.image_size": None, "model.weights": None, "stream.tasks": 2}
    changes |= {"training.rounds": 1, "training.cohort": 2}
    data = few_images(config.data.name, config.data.image_size)
    run = api.run(recipe, data=data, out=tmp_path / "run", **changes)
    assert run.summary["rounds"] == run.summary["stages"] == 2 and run.summary["clients"] == 100
    assert run.summary["failed_clients"] == run.summary["degraded_rounds"] == run.summary["rejected_updates"] == 0
    assert run.summary["sample_visits"] > 0 and run.summary["final_accuracy"] is not None
    assert run.summary["parameters"] > (80e6 if "vit" in recipe else 14e6)


FEDFIP = [name for name in recipe_names() if name.startswith("fedfip/")]


def few_of_each_domain(size: int) -> tuple[Any, ...]:
    """120 images of each of three domains, two classes, with their domains; noise where PACS is not here."""
    y, domain = torch.arange(360) % 2, torch.arange(3).repeat_interleave(120)
    if not (DATA / "flwrlabs" / "pacs").is_dir():
        return torch.randint(0, 256, (360, 3, size, size), dtype=torch.uint8, generator=generator("images")), y, domain
    source = load_source("flwrlabs/pacs", root=DATA, image_size=size)
    cells = [(source.y_train == c) & (source.domains_train == d) for d in range(3) for c in range(2)]
    rows = torch.stack([cell.nonzero()[:60, 0] for cell in cells]).reshape(3, 2, 60).transpose(1, 2).flatten()
    return torch.as_tensor(source.x_train[rows]), y, domain


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FEDFIP)
def test_fedfips_recipes_carry_out_two_rounds_on_a_few_images(recipe: str, tmp_path: Path) -> None:
    """The second round is the first whose clients are sent a part of the network."""
    config = resolve(resolve_source(recipe)[1])
    changes: dict[str, Any] = {"data.image_size": None, "data.augment": "none", "training.rounds": 2}
    changes |= {"data.domain": None, "partition.share": 1.0, "training.local_epochs": 1, "training.cohort": 4}
    data = few_of_each_domain(config.data.image_size)
    run = api.run(recipe, data=data, out=tmp_path / "run", **changes)
    found = run.summary
    assert (found["rounds"], found["clients"], len(found["domain_accuracy"])) == (2, 20, 3)
    assert found["failed_clients"] == found["degraded_rounds"] == found["rejected_updates"] == 0
    assert 11e6 < found["parameters"] < 12e6
    assert found["active_parameters"] < (0.75 if config.method["keep"] == 0.8 else 0.1) * found["parameters"]


@pytest.mark.slow
def test_joint_is_above_replay_and_replay_above_fedavg_on_the_quickstart(tmp_path: Path) -> None:
    """The order that any stream of classes must show, with separated 95 % intervals and the same sample visits."""
    found = compare("quickstart", ["fedavg", "replay", "joint"], seeds=(0, 1, 2), out=tmp_path / "compare")
    assert found.summary["budget"]["equal"] is True
    for key in ("final_accuracy", "average_incremental_accuracy"):
        measured = {label: entry["metrics"][key] for label, entry in found.summary["methods"].items()}
        assert measured["joint"]["low"] > measured["replay"]["high"], key
        assert measured["replay"]["low"] > measured["fedavg"]["high"], key


@pytest.mark.slow
def test_news_are_told_apart_and_joint_training_does_so_best(tmp_path: Path) -> None:
    root = str(root_of("agnews-moe-small"))
    found = {
        name: api.run("agnews-moe-small", method=name, out=tmp_path / name, **{"data.root": root}).summary
        for name in ("fedavg", "fedalign_moe", "joint")
    }
    accuracy = {name: summary["final_accuracy"] for name, summary in found.items()}
    assert min(accuracy.values()) > 2 * 0.25 and accuracy["joint"] > accuracy["fedavg"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mmlu-moe-small", "hellaswag-moe-small"])
def test_questions_are_answered_at_chance_level_by_a_model_that_knows_nothing(recipe: str, tmp_path: Path) -> None:
    found = api.run(recipe, out=tmp_path / "run", **{"data.root": str(root_of(recipe))}).summary
    assert abs(found["final_accuracy"] - 0.25) < 0.08
    assert abs(found["measures"]["accuracy_norm"] - 0.25) < 0.08 and found["measures"]["perplexity"] > 1
