"""The configuration tree: defaults, layers, sentences, the hash."""

from __future__ import annotations

import copy
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedloom.config import config_hash, overrides, recipe_names, resolve, resolve_source
from fedloom.config.describe import method_settings, tree_settings
from fedloom.config.digest import data_kind
from fedloom.config.layers import merge, parse
from fedloom.config.sections import Config
from fedloom.config.words import keys
from fedloom.core.errors import ConfigError, FedloomError

WRONG = [
    ("training.rounds=0", "training.rounds must be at least 1, got 0"),
    ("training.rounds=-3", "training.rounds must be at least 1, got -3"),
    ("training.rounds=two", "training.rounds must be a whole number, got 'two'"),
    ("training.rounds=1.5", "training.rounds must be a whole number, got 1.5"),
    ("training.rounds=true", "training.rounds must be a whole number, got True"),
    ("training.local_epochs=0", "training.local_epochs must be at least 1"),
    ("training.batch_size=0", "training.batch_size must be at least 1"),
    ("training.cohort=0", "training.cohort must be a count of at least 1"),
    ("training.cohort=1.5", "a fraction in (0, 1]"),
    ("training.cohort=0.0", "a fraction in (0, 1]"),
    ("training.cohort=.nan", "training.cohort must be"),
    ("training.cohort=11", "training.cohort is 11 but there are 10 clients"),
    ("training.optimizer.lr=0", "training.optimizer.lr must be above 0, got 0"),
    ("training.optimizer.lr=-0.1", "training.optimizer.lr must be above 0, got -0.1"),
    ("training.optimizer.lr=.nan", "training.optimizer.lr must be a finite number, got nan"),
    ("training.optimizer.lr=.inf", "training.optimizer.lr must be a finite number, got inf"),
    ("training.optimizer.lr='0.1'", "training.optimizer.lr must be a number, got '0.1'"),
    ("training.optimizer.momentum=1", "training.optimizer.momentum must be in [0, 1), got 1"),
    ("training.optimizer.name=adam", "unknown training.optimizer.name 'adam'. Did you mean 'adamw'?"),
    ("training.optimizer.betas=[0.9, 0.99]", "unknown key 'training.optimizer.betas'"),
    ("training.optimizer.nesterov=1", "training.optimizer.nesterov must be true or false, got 1"),
    ("training.schedule.name=cosin", "Did you mean 'cosine'?"),
    ("training.clip_norm=0", "training.clip_norm must be above 0"),
    ("training.precision=fp16", "training.precision must be one of fp32, bf16, got 'fp16'"),
    ("training.roundz=3", "unknown key 'training.roundz'. Did you mean 'training.rounds'?"),
    ("training.lr=0.1", "Did you mean 'training.optimizer.lr'?"),
    ("trainning.rounds=3", "unknown key 'trainning'. Did you mean 'training'?"),
    ("fedprx.mu=0.1", "unknown key 'fedprx.mu'. Did you mean 'fedprox.mu'?"),
    ("partition.alpha=0", "partition.alpha must be above 0, got 0"),
    ("partition.alpha=-1", "partition.alpha must be above 0, got -1"),
    ("partition.alpha=.nan", "partition.alpha must be a finite number"),
    ("partition.clients=0", "partition.clients must be at least 1, got 0"),
    ("partition.kind=dirichlt", "Did you mean 'dirichlet'?"),
    ("partition=3", "partition must be a mapping of options"),
    ("training.optimizer=adam", "unknown training.optimizer.name 'adam'. Did you mean 'adamw'?"),
    ("stream.tasks=0", "stream.tasks must be coarse or fine or a whole number of at least 1, got 0"),
    ("stream.class_order=sorted", "stream.class_order must be seeded, natural or a list of class ids"),
    ("stream.arrival=[1]", "stream.arrival must be synchronous"),
    ("engine.name=seriall", "unknown engine 'seriall'. Did you mean 'serial'?"),
    ("engine.name=cohort", "unknown engine 'cohort'. Known: flower, serial."),
    ("engine.runtime=grid", "the engine serial has no runtimes"),
    ("engine.runtime=rya", "engine.runtime must be"),
    ("engine.join=0", "engine.join must be above 0, got 0"),
    ("engine.reply_limit=0", "engine.reply_limit must be at least 1, got 0"),
    ("engine.device=gpu", "engine.device must be auto, cpu, cuda, cuda:N or mps, got 'gpu'"),
    ("engine.workers=0", "engine.workers must be auto or a whole number of at least 1, got 0"),
    ("engine.threads=0", "engine.threads must be at least 1"),
    ("engine.on_client_failure=retry(0)", "engine.on_client_failure must be fail, skip or retry(n)"),
    ("engine.min_replies=99", "engine.min_replies is 99 but there are 10 clients"),
    ("engine.deadline=0", "engine.deadline must be above 0"),
    ("evaluate.every=0", "evaluate.every must be stage or a whole number"),
    ("evaluate.personal=yes please", "evaluate.personal must be true or false"),
    ("checkpoint.keep=0", "checkpoint.keep must be at least 1"),
    ("tracker=wandbb", "unknown tracker.name 'wandbb'. Did you mean 'wandb'? Known: mlflow, tensorboard, wandb."),
    ("tracker={name: mlflow, experiment: ''}", "tracker.experiment must be text that is not empty, got ''"),
    ("tracker={name: mlflow, uri: ''}", "tracker.uri must be text that is not empty, got ''"),
    ("tracker={name: wandb, tags: ['']}", "tracker.tags.0 must be text that is not empty, got ''"),
    ("tracker=3", "tracker must be a mapping of options, got 3"),
    ("tracker.project=x", "tracker.name is missing: set it to one of mlflow, tensorboard, wandb"),
    ("tracker={name: tensorboard, project: x}", "unknown key 'tracker.project'"),
    ("tracker={name: wandb, mode: on}", "tracker.mode must be one of offline, online, got True"),
    ("tracker={name: wandb, tags: [1]}", "tracker.tags.0 must be text, got 1"),
    ("seed=-1", "seed must be at least 0"),
    ("seed=1.0", "seed must be a whole number"),
    ("data.augment=flp", "Did you mean 'flip'?"),
    ("data.test_fraction=1.0", "data.test_fraction must be in (0, 1), got 1.0"),
    ("method=fedprx", "unknown method 'fedprx'. Did you mean 'fedprox'?"),
    ("method=fedduet@code_2026", "method 'fedduet@code_2026': a preset is named so by `compare`"),
    ("method.name=7", "method.name must be the name of a method, got 7"),
    ("method.preset=code_1999", "unknown preset of fedavg 'code_1999'"),
    ("method=3", "method must be a mapping"),
]


@pytest.mark.parametrize(("pair", "sentence"), WRONG)
def test_wrong_values_get_one_sentence(pair: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(overrides([pair]))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        ("method.mu=-1", "method.mu must be at least 0, got -1"),
        ("method.mu=.nan", "method.mu must be a finite number, got nan"),
        ("method.mu=abc", "method.mu must be a number, got 'abc'"),
        ("method.m=1", "unknown option of fedprox 'method.m'. Did you mean 'method.mu'?"),
        ("method.label_scope=sen", "Did you mean 'seen'?"),
        ("method.uniform=1", "method.uniform must be true or false, got 1"),
    ],
)
def test_wrong_method_options(pair: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(overrides(["method=fedprox", pair]))
    assert sentence in str(caught.value)


def test_a_bare_name_stands_for_a_section_with_that_choice() -> None:
    pairs = ["partition=iid", "stream=static", "model=mlp", "training.optimizer=adamw", "training.optimizer.lr=0.5"]
    tree = resolve(overrides([*pairs, "engine.threads=2", "engine=serial"]))
    assert (tree.partition.kind, tree.stream.kind, tree.model.name) == ("iid", "static", "mlp")
    assert (tree.training.optimizer.name, tree.training.optimizer.lr) == ("adamw", 0.5)
    assert (tree.engine.name, tree.engine.threads) == ("serial", 2), "a name leaves its section's keys alone"
    layer = {"training": {"optimizer": "adamw", "schedule": "cosine"}, "data": "sklearn/digits"}
    assert resolve(layer).training.schedule.name == "cosine"
    assert resolve(layer, {"training.optimizer.lr": 0.5}).training.optimizer.name == "adamw"


def test_an_option_of_other_methods_is_said_to_be_theirs() -> None:
    with pytest.raises(ConfigError, match=r"unknown option of fedavg 'method.mu': it is an option of fedfmx, fedprox"):
        resolve(overrides(["method=fedavg", "method.mu=0.1"]))


def test_no_library_speaks_in_a_sentence() -> None:
    for pair in ("method.stop=pt", "method.body=pt", "method.empty_value=[1]"):
        with pytest.raises(ConfigError) as caught:
            resolve(overrides(["method=fedfmx", pair]))
        assert "Value error" not in str(caught.value) and "valid" not in str(caught.value)


def test_settings_are_described_by_the_schema() -> None:
    options = {s.key: s for s in method_settings("fedprox")}
    assert options["method.mu"] == (
        "method.mu",
        "0.01",
        "a number at least 0",
        "weight of the proximal term; 0 is FedAvg",
    )
    assert options["method.label_scope"].allowed == "seen | current"
    groups = {group.title: group for group in tree_settings()}
    adamw = {s.key: s for s in groups["training.optimizer.name=adamw"].settings}
    assert adamw["training.optimizer.betas"].default == "[0.9, 0.999]"
    assert "a number in [0, 1)" in adamw["training.optimizer.betas"].allowed
    assert groups["stream.kind=class_incremental (default)"].about.startswith("Classes arrive task by task.")
    known = {s.key for group in groups.values() for s in group.settings}
    chosen = {"stream.kind", "partition.kind", "training.schedule.name", "training.optimizer.name", "tracker.name"}
    sections = {"data", "stream", "partition", "model", "training", "engine", "evaluate", "checkpoint", "method"}
    assert set(keys(Config)) - known <= chosen | sections | {"training.schedule", "training.optimizer", "tracker"}


def test_probabilities_of_fedfmx_have_ranges() -> None:
    for pair, sentence in (
        ("method.rho=1", "method.rho must be in [0, 1), got 1"),
        ("method.alpha=1.5", "method.alpha must be in [0, 1], got 1.5"),
        ("method.experts=0", "method.experts must be at least 1"),
        ("method.beta=-1", "method.beta must be at least 0"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(overrides(["method=fedfmx", pair]))
        assert sentence in str(caught.value)


def test_values_are_yaml_and_typed() -> None:
    tree = resolve(overrides(["training.optimizer.lr=1e-3", "training.optimizer.nesterov=false", "training.cohort=1"]))
    assert tree.training.optimizer.lr == 0.001
    assert tree.training.optimizer.nesterov is False
    assert tree.training.cohort == 1 and isinstance(tree.training.cohort, int)
    assert resolve(overrides(["training.cohort=1.0"])).training.cohort == 1.0
    assert isinstance(resolve(overrides(["training.cohort=1.0"])).training.cohort, float)


def test_an_integer_passes_for_a_number() -> None:
    assert resolve(overrides(["training.optimizer.lr=1"])).training.optimizer.lr == 1.0


def test_a_key_given_twice_takes_the_last_value() -> None:
    assert resolve(overrides(["seed=1", "seed=2"])).seed == 2


def test_dotted_keys_work_from_python() -> None:
    tree = resolve({"training.rounds": 1, "training": {"batch_size": 4}, "training.optimizer.lr": 0.5})
    assert (tree.training.rounds, tree.training.batch_size, tree.training.optimizer.lr) == (1, 4, 0.5)
    assert resolve({"method.mu": 0.5, "method": "fedprox"}).method["mu"] == 0.5
    assert resolve({"method": "fedprox", "method.mu": 0.5}).method["mu"] == 0.5
    assert resolve({"training": {"rounds": 2}}, {"training.rounds": 3}).training.rounds == 3
    low = {"training.rounds": 1, "training": {"rounds": 2}}
    assert resolve(low).training.rounds == 2 and list(low) == ["training.rounds", "training"]


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("training.roundz", "unknown key 'training.roundz'. Did you mean 'training.rounds'?"),
        ("fedprx.mu", "unknown key 'fedprx.mu'. Did you mean 'fedprox.mu'?"),
        ("training..rounds", "'training..rounds' is no key of the configuration"),
    ],
)
def test_wrong_dotted_keys(key: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({key: 1})
    assert sentence in str(caught.value)


@pytest.mark.parametrize("pair", ["seed", "=1", "a..b=1", ".seed=1"])
def test_overrides_need_a_key_and_a_value(pair: str) -> None:
    with pytest.raises(ConfigError, match="--set takes key=value"):
        overrides([pair])


def test_broken_yaml_names_its_place() -> None:
    with pytest.raises(ConfigError, match="the value of --set training is not valid YAML"):
        overrides(["training={rounds: 1"])


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_survive_yaml(value: float) -> None:
    found = parse(repr(value), "test")
    assert isinstance(found, float) and found == value and math.copysign(1, found) == math.copysign(1, value)


def test_changing_a_method_drops_the_options_of_the_old_one() -> None:
    low = {"method": {"name": "fedprox", "mu": 1.0}}
    tree = resolve(low, {"method": {"name": "fedavg"}})
    assert tree.method == {
        "name": "fedavg",
        "preset": "paper",
        "label_scope": "seen",
        "uniform": False,
        "buffers": "mean",
    }


def test_naming_the_same_method_keeps_its_options() -> None:
    assert resolve({"method": {"name": "fedprox", "mu": 1.0}}, {"method": "fedprox"}).method["mu"] == 1.0


def test_changing_a_kind_keeps_what_both_know() -> None:
    tree = resolve({"partition": {"kind": "dirichlet", "alpha": 1.0, "clients": 7}}, {"partition": {"kind": "iid"}})
    assert tree.partition.model_dump() == {"kind": "iid", "clients": 7}


def test_an_option_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'partition.alpha'"):
        resolve({"partition": {"kind": "iid", "alpha": 1.0}})


def test_changing_a_preset_lets_its_values_through(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.methods import fedprox

    monkeypatch.setattr(fedprox, "PRESETS", {"paper": {}, "code_2020": {"mu": 0.5}})
    low = {"method": {"name": "fedprox", "mu": 0.1, "uniform": True}}
    method = resolve(low, {"method": {"preset": "code_2020"}}).method
    assert (method["mu"], method["uniform"]) == (0.5, True)
    assert resolve(low, {"method": {"preset": "code_2020", "mu": 0.2}}).method["mu"] == 0.2


def test_merge_leaves_its_arguments_alone() -> None:
    low, high = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}
    before = copy.deepcopy((low, high))
    assert merge(low, high) == {"a": {"b": 3, "c": 2}}
    assert (low, high) == before


def test_a_schedule_replaces_an_arrival() -> None:
    tree = resolve({"stream": {"arrival": {0: {0: 1}}}}, {"stream": {"arrival": {2: {0: 0}}}})
    assert tree.stream.arrival == {2: {0: 0}}
    assert resolve(tree.as_dict()).stream.arrival == {2: {0: 0}}


def test_a_resolved_tree_resolves_to_itself() -> None:
    for layer in (
        {},
        {"stream": {"kind": "static"}},
        {"training": {"optimizer": {"name": "adamw"}}},
        {"method": "fedfmx"},
    ):
        tree = resolve(layer)
        assert resolve(yaml.safe_load(yaml.safe_dump(tree.as_dict()))) == tree


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_resolve(name: str) -> None:
    found, layer = resolve_source(name)
    tree = resolve(layer)
    assert found == name
    assert tree.training.rounds >= 5


def test_recipes_keep_their_promises() -> None:
    quick = resolve(resolve_source("quickstart")[1])
    assert (quick.data.name, quick.method["name"], quick.stream.tasks) == ("sklearn/digits", "fedfmx", 5)
    cifar = resolve(resolve_source("cifar100-fcil-small")[1])
    assert (cifar.partition.clients, cifar.stream.tasks, cifar.partition.alpha) == (20, 10, 0.5)
    small = resolve(resolve_source("small")[1])
    assert (small.training.rounds, small.training.cohort, small.training.batch_size) == (20, 10, 32)


def test_unknown_recipe_and_file(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'quikstart'. Did you mean 'quickstart'\?"):
        resolve_source("quikstart")
    with pytest.raises(ConfigError, match=r"unknown recipe 'fedfmx/table1-cifar10-dl'. Did you mean"):
        resolve_source("fedfmx/table1-cifar10-dl")
    for name in ("x" * 300, "a\0b", ""):
        with pytest.raises(ConfigError, match="unknown recipe"):
            resolve_source(name)
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_source(str(tmp_path / "nope.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="must be a mapping of sections, got a list"):
        resolve_source(str(tmp_path / "list.yaml"))
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="is not valid YAML, line"):
        resolve_source(str(tmp_path / "broken.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    assert resolve_source(str(tmp_path / "empty.yaml")) == ("empty", {})
    with pytest.raises(ConfigError, match="is a folder"):
        resolve_source(f"{tmp_path}/")


def test_a_file_goes_over_its_base(tmp_path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "low.yaml").write_text("base: quickstart\ntraining.rounds: 3\npartition: {alpha: 0.1}\n")
    top = tmp_path / "sub" / "top.yaml"
    top.write_text("base: ../low.yaml\nmethod: fedavg\npartition: {kind: iid}\ntraining: {rounds: 2}\n")
    name, layer = resolve_source(str(top))
    tree, quick = resolve(layer), resolve(resolve_source("quickstart")[1])
    assert name == "top" and tree.method["name"] == "fedavg" and tree.partition.kind == "iid"
    assert tree.training == quick.training.model_copy(update={"rounds": 2}), "values of both bases, the file's own last"
    assert resolve(resolve_source(str(tmp_path / "low.yaml"))[1]).partition.alpha == 0.1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("base: 3", "must be a recipe's name or the path of a YAML file, got 3"),
        ("base: quikstart", r"is 'quikstart', which is neither a recipe nor a YAML file.*Did you mean 'quickstart'\?"),
        ("base: gone.yaml", "is 'gone.yaml', which is neither a recipe nor a YAML file beside it; correct it"),
        ("base: ''", "must be a recipe's name or the path of a YAML file"),
        (f"base: {'x' * 300}.yaml", "neither a recipe nor a YAML file beside it"),
        ('base: "a\\0b.yaml"', "neither a recipe nor a YAML file beside it"),
        ("base: loop.yaml", "neither a recipe nor a YAML file beside it"),
        ("base: .", "neither a recipe nor a YAML file beside it"),
        ("base: quickstart\n3: 4", "keys of the configuration must be text, got 3"),
        ("base: quickstart\ntraining: &t {optimizer: *t}", "training.*refers to itself"),
        ("base: own.yaml", "leads back to"),
        ("base: other.yaml", "leads back to"),
    ],
)
def test_a_base_that_cannot_be_is_refused(text: str, told: str, tmp_path) -> None:
    (tmp_path / "other.yaml").write_text("base: own.yaml\n")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    (tmp_path / "own.yaml").write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=told):
        resolve_source(str(tmp_path / "own.yaml"))


def test_recipes_of_table_1_hold_the_papers_protocol() -> None:
    names = [name for name in recipe_names() if name.startswith("fedfmx/table1-")]
    assert len(names) == 14
    for name in names:
        tree = resolve(resolve_source(name)[1])
        assert (tree.partition.clients, tree.training.cohort, tree.training.local_epochs) == (100, 0.2, 5)
        assert (tree.training.batch_size, tree.training.optimizer.lr, tree.stream.tasks) == (64, 0.01, "fine")
        assert tree.training.optimizer.momentum == 0.9 and tree.training.optimizer.weight_decay == 1e-5
        level = {"dirichlet": ("alpha", 0.5), "quantity_label": ("alpha_q", 4)}[tree.partition.kind]
        assert getattr(tree.partition, level[0]) == level[1] and ("dli" in name) == (level[0] == "alpha")
        assert ("vit" in name) == tree.model.name.startswith("timm/vit_base_patch16_224.dino")
        assert "vit" not in name or (tree.data.image_size == 224 and tree.model.weights == "pretrained")


def digest_of(tree: dict, data: str = "f") -> str:
    return config_hash(tree, data, "cpu", "contiguous")


def test_hash_leaves_out_what_cannot_change_a_result() -> None:
    base = resolve({}).as_dict()
    same = resolve(overrides(["engine.workers=2", "data.root=/elsewhere"])).as_dict()
    assert digest_of(base) == digest_of(same)
    for pair in ("engine.threads=2", "seed=1", "training.rounds=6", "training.optimizer.lr=0.1", "method.uniform=true"):
        assert digest_of(resolve(overrides([pair])).as_dict()) != digest_of(base), pair
    assert digest_of(base, "g") != digest_of(base)
    assert config_hash(base, "f", "cuda", "contiguous") != digest_of(base)
    assert config_hash(base, "f", "cpu", "channels_last") != digest_of(base)


def test_hash_knows_an_integer_option_from_a_fraction() -> None:
    one, all_of_them = (digest_of(resolve(overrides([f"training.cohort={v}"])).as_dict()) for v in ("1", "1.0"))
    assert one != all_of_them


def test_hash_forgets_paths() -> None:
    assert data_kind("folder:/home/me/x") == "folder:"
    assert data_kind("uoft-cs/cifar10") == "uoft-cs/cifar10"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4))
def test_any_value_gives_a_tree_or_a_sentence(value: object) -> None:
    for layer in (
        {"training": {"rounds": value}},
        {"training": value},
        {"partition": {"kind": value}},
        {"engine": value},
    ):
        try:
            resolve(layer)
        except FedloomError as error:
            assert "\n" not in str(error) or isinstance(value, str)


def test_another_model_drops_what_it_has_no_use_for() -> None:
    low = {"model": {"name": "switch_encoder", "weights": "w.safetensors", "options": {"hidden": 32, "gate_std": 0.1}}}
    assert merge(low, {"model": {"name": "moe_decoder"}})["model"] == {"name": "moe_decoder", "options": {"hidden": 32}}
    assert merge(low, {"model": {"name": "small_cnn"}})["model"] == {"name": "small_cnn"}
    assert merge(low, {"model": {"name": "my_models:network"}})["model"] == {"name": "my_models:network"}
    kept = merge(low, {"model": {"name": "switch_encoder", "options": {"hidden": 16}}})["model"]
    assert kept["options"] == {"hidden": 16, "gate_std": 0.1} and kept["weights"] == "w.safetensors"
