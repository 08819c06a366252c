"""A checked configuration -> method, network, data plan, experiment. Used by the API, the CLI and workers."""

from __future__ import annotations

import functools
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from fedloom.config import Config, config_hash, resolve
from fedloom.config.options import arguments, takes_local
from fedloom.core.errors import ConfigError, DataError, FedloomError, origin
from fedloom.network import default_model, network, vocab_size, with_words

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fedloom.core import Forward, Method
    from fedloom.data import Plan
    from fedloom.data.source import Source
    from fedloom.engine.experiment import Experiment, Options
    from fedloom.local import LocalSGD

CONV_RATE = 3e10  # floating-point operations per second of one core, as measured on small networks
LONG = 60.0  # seconds of estimated work from which `workers: auto` uses every core


@dataclass(frozen=True)
class Built:
    """A run that is ready to start.

    config: the resolved tree (`auto` and `model` replaced by what was found). hash: see `config_hash`.
    module: the network of the method, with its initial values; for counts only.
    """

    config: Config
    source: Source
    experiment: Experiment
    options: Options
    hash: str
    module: nn.Module


def build(config: Config, *, data: Any = None, model: Any = None) -> Built:
    """Resolve what depends on data and machine, then assemble everything.

    data: the user's arrays or datasets instead of `data.name`. model: the user's module or factory instead of
    `model.name`. Raises `ConfigError` or `DataError` for whatever cannot be run.
    """
    source = _source(config, data)
    config, chosen = _resolved(config, source, data, model)
    made = _experiment(config, source, model, chosen)
    module = _module(made)
    if made.method.needs_experts:
        from fedloom.core.moe import need_moe_layers

        need_moe_layers(module, config.method["name"])
    layout = _layout(config, module)
    tree = _with(config, "training", memory_format=layout)
    made = replace(made, forward=forward(tree), **_rebuild(tree, source, model))
    key = config_hash(tree.as_dict(), source.fingerprint, made.forward.device.type, layout)
    return Built(tree, source, made, _options(tree, made, module, key), key, module)


def _module(made: Experiment) -> nn.Module:
    try:
        return made.method.module(made.spec)
    except FedloomError:
        raise
    except (Exception, SystemExit) as error:  # networks and `module` may be code of the user
        if isinstance(error, MemoryError) or "allocate" in str(error):
            raise ConfigError("the model does not fit into memory; lower its widths or the method's experts") from error
        where = f" ({line})" if (line := origin(error)) else ""
        raise ConfigError(f"the method's network cannot be made: {type(error).__name__}: {error}{where}") from error


def experiment(config: Config | Mapping[str, Any], *, data: Any = None, model: Any = None) -> Experiment:
    """The experiment alone."""
    return build(config if isinstance(config, Config) else resolve(config), data=data, model=model).experiment


def experiment_from_dict(tree: Mapping[str, Any], source: Source | None = None, model: Any = None) -> Experiment:
    """Make the experiment of a resolved tree again, in another process, say.

    source: the data, where they cannot be found by name. model: the user's own network.
    """
    config = resolve(tree)
    found = source if source is not None else load_data(config)
    return replace(_experiment(config, found, model, method(config)), forward=forward(config))


def load_data(config: Config) -> Source:
    """The data set of the section `data`."""
    from fedloom.data import load_source

    given = _data(config)
    return load_source(given.pop("name"), **given)


def _data(config: Config) -> dict[str, Any]:
    """The section `data` without what is done with the examples later."""
    from fedloom.network import own_tokenizer

    given = config.data.model_dump(exclude={"augment"})
    return given | {"tokenizer": given["tokenizer"] or own_tokenizer(config.model.name)}


def plan(config: Config, source: Source) -> Plan:
    """Who holds what, when."""
    from fedloom.data import make_plan

    return make_plan(
        source,
        stream=config.stream.model_dump(),
        partition=config.partition.model_dump(),
        augment=config.data.augment,
        seed=config.seed,
        rounds=config.training.rounds,
    )


def method(config: Config) -> Method:
    """The method with its options; the training loop comes from the section `training`.

    Raises `ConfigError` for options that do not go together, and for a deployed federation of a method that needs
    more than each client's own data.
    """
    from fedloom.core import Method

    made = _made(config)
    if config.engine.runtime == "deployment" and made.data_view != Method.data_view:
        raise ConfigError(
            f"method '{config.method['name']}' has the data view {made.data_view}, for which all data must be on one "
            "machine; `fedloom run` it there without engine.runtime deployment, or deploy another method"
        )
    return made


def _made(config: Config) -> Method:
    from fedloom.core import Method
    from fedloom.methods import load

    section = config.method
    factory = load(section["name"])
    if isinstance(factory, Method):
        return factory
    given = arguments(section)
    if takes_local(section["name"]):
        given["local"] = local(config)
    try:
        made = factory(**given)
    except FedloomError:
        raise
    except (Exception, SystemExit) as error:  # a factory is code of the user
        where = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}, {origin(error)}: "
        raise ConfigError(f"method '{section['name']}' refuses its options: {where}{error}") from error
    if not isinstance(made, Method):
        raise ConfigError(f"method.name '{section['name']}' made a {type(made).__name__}, not a fedloom Method")
    return made


def local(config: Config) -> LocalSGD:
    """The training loop of the section `training`."""
    from fedloom.local import SGD, AdamW, LocalSGD, Schedule

    part = config.training
    kinds = {"sgd": SGD, "adamw": AdamW}
    return LocalSGD(
        optimizer=kinds[part.optimizer.name](**part.optimizer.model_dump(exclude={"name"})),
        schedule=Schedule(**part.schedule.model_dump()),
        epochs=part.local_epochs,
        batch_size=part.batch_size,
        clip_norm=part.clip_norm,
    )


def device(name: str) -> torch.device:
    """The device of that name; `auto` is CUDA where there is one. `ConfigError` for one this machine lacks."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if name == "mps":
        if torch.backends.mps.is_available():
            return torch.device("mps")
        raise ConfigError("engine.device is mps, which this machine lacks; set it to auto or cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = int(name.partition(":")[2] or 0)
    if wanted >= count:
        have = f"has {count} CUDA device{'s' * (count != 1)}" if count else "has no CUDA device"
        raise ConfigError(f"engine.device is {name}, but this machine {have}; set it to auto or cpu")
    return torch.device(name)


def _source(config: Config, data: Any) -> Source:
    if data is None:
        return load_data(config)
    from fedloom.data import load_source
    from fedloom.data.source import Source

    if isinstance(data, Source):
        return data
    if isinstance(data, str):
        raise DataError(f"data must be arrays or a dataset, got the name '{data}'; names go to data={{'name': ...}}")
    given = _data(config)
    return load_source(data, **{key: value for key, value in given.items() if key not in ("name", "root")})


def _resolved(config: Config, source: Source, data: Any, model: Any) -> tuple[Config, Method]:
    if data is not None:
        config = _with(config, "data", name=_stored_name(source))
    if model is not None:
        from fedloom.own_model import identity

        config = _with(config, "model", name=identity(model))
    made = method(config)
    if config.model.name == "auto":
        config = _with(config, "model", name=default_model(source, made))
    config = with_words(config, source, made, model)
    return _with(config, "engine", device=_device_name(config)), made


def _stored_name(source: Source) -> str:
    from fedloom.data import store_source

    try:
        return store_source(source)
    except DataError:  # no cache: the run goes on from memory, and the name still tells the data apart
        return f"stored:{source.fingerprint}"


def _device_name(config: Config) -> str:
    return str(device(config.engine.device)) if config.engine.device == "auto" else config.engine.device


def _with(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _experiment(config: Config, source: Source, model: Any, made: Method) -> Experiment:
    """Everything but the forward pass and the way to other processes."""
    from fedloom.core import Forward
    from fedloom.engine.experiment import Experiment
    from fedloom.select.sampling import uniform_cohort

    built = plan(config, source)
    if made.needs_domains and not source.domain_names:
        raise ConfigError(
            f"method '{config.method['name']}' needs the domain of every example, and data.name '{config.data.name}' "
            "has none; name the column that tells it with data.domain, or take a data set with domains"
        )
    return Experiment(
        method=made,
        spec=network(
            config,
            source.num_classes,
            source.input_shape,
            model,
            vocab_size=vocab_size(source),
            statistics=(source.mean, source.std),
        ),
        forward=Forward(),
        plan=built,
        sampler=uniform_cohort,
        seed=config.seed,
        cohort=config.training.cohort,
        threads=config.engine.threads,
    )


def _layout(config: Config, module: nn.Module) -> str:
    asked = config.training.memory_format
    if asked != "model":
        return asked
    body = getattr(module, "backbone", None)
    return str(getattr(module, "memory_format", getattr(body, "memory_format", "contiguous")))


def forward(config: Config) -> Forward:
    """How a forward pass runs; the memory format must be resolved."""
    import torch

    from fedloom.core import Forward

    layouts = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    part = config.training
    return Forward(
        device=device(config.engine.device),
        memory_format=layouts[part.memory_format],
        precision=part.precision,
        grad_checkpointing=part.grad_checkpointing,
    )


def _rebuild(config: Config, source: Source, model: Any) -> dict[str, Any]:
    """The fields `rebuild` and `why_not` of the experiment."""
    by_name = not config.data.name.startswith("stored:")
    recipe = functools.partial(experiment_from_dict, config.as_dict(), None if by_name else source, model)
    if model is not None:
        home = getattr(model, "__module__", None) if not _is_module(model) else type(model).__module__
        if home == "__main__":
            return {"why_not": "the model is defined in the main program, where other processes cannot import it"}
        try:
            pickle.dumps(model)
        except Exception as error:  # pickle raises many kinds
            return {"why_not": f"the model cannot be sent to other processes ({error})"}
    return {"rebuild": recipe}


def _is_module(model: Any) -> bool:
    from torch import nn

    return isinstance(model, nn.Module)


def _options(config: Config, built: Experiment, module: nn.Module, key: str) -> Options:
    from fedloom.engine.experiment import Options

    engine = config.engine
    retry = re.fullmatch(r"retry\((\d+)\)", engine.on_client_failure)
    given = {
        "engine": engine.name,
        "runtime": engine.runtime,
        "workers": workers(config, built, module),
        "join": engine.join,
        "reply_limit": engine.reply_limit,
        "on_client_failure": "retry" if retry else engine.on_client_failure,
        "retries": int(retry[1]) if retry else 0,
        "min_replies": min(engine.min_replies, built.plan.num_clients),  # a pooled view has one client
        "deadline": engine.deadline,
        "evaluate_every": config.evaluate.every,
        "personal": config.evaluate.personal,
        "checkpoint_every": config.checkpoint.every,
        "checkpoint_keep": config.checkpoint.keep,
        "config_hash": key,
    }
    assert given.keys() <= {f.name for f in fields(Options)}
    return Options(**given)


def workers(config: Config, built: Experiment, module: nn.Module) -> int:
    """Worker processes. `auto`: one per core when the run is estimated to take over a minute, else 1.

    The number never changes a result, so the estimate may be rough. One client leaves nothing to share.
    """
    if config.engine.workers != "auto":
        return config.engine.workers
    if built.rebuild is None or built.forward.device.type != "cpu" or built.plan.num_clients == 1:
        return 1
    if config.engine.name == "flower" and config.engine.runtime != "simulation":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    seconds = visits(config, built.plan) * _operations(module, built) / CONV_RATE
    return max(1, cores // config.engine.threads) if seconds > LONG else 1


def visits(config: Config, plan: Any) -> float:
    """Examples that clients will train on, each visit counted; stages with many clients by their first 100.

    A view of the plan costs what the plan does.
    """
    from fedloom.engine.views import stream_of

    plan, total = stream_of(plan), 0.0
    for stage in range(plan.num_stages):
        clients = plan.participants(stage)
        if not len(clients):
            continue
        few = clients[:100]
        mean = sum(plan.size(client, stage) for client in few) / len(few)
        cohort = config.training.cohort
        chosen = min(cohort, len(clients)) if isinstance(cohort, int) else cohort * len(clients)
        total += mean * chosen * config.training.local_epochs * config.training.rounds
    return total


def _operations(module: nn.Module, built: Experiment) -> float:
    """Rough floating-point operations of a training step per example: 6 per weight and use.

    A convolution's weight is used once per pixel of its output, taken as a quarter of the input's on average.
    """
    shape = getattr(built.spec, "input_shape", ())
    pixels = max(1.0, shape[1] * shape[2] / 4) if len(shape) == 3 else 1.0
    return sum(6.0 * p.numel() * (pixels if p.dim() == 4 else 1.0) for p in module.parameters())
