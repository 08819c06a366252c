"""The sections of the tree as strict pydantic models; defaults live here and nowhere else.

Sections with a choice key (`name` or `kind`) are tagged unions: each choice knows its own options only, so
an option that the choice cannot use is refused instead of ignored. Values come in as JSON (see
`fedloom.config.resolve`): lists fit tuples, strings never pass for numbers or booleans.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Discriminator, Field, PlainValidator, Tag

# Upper bounds: numbers beyond them are slips of the hand. Training in 32 bits cannot use rates of 1e38, and lists
# of trips, clients or stages would fill the memory before the first round.
MOST, LARGEST, MOST_WORKERS = 10**6, 1e6, 256

Count = Annotated[int, Ge(1), Le(MOST)]
Natural = Annotated[int, Ge(0), Le(MOST)]
Clients = Annotated[int, Ge(1), Le(10**7)]
Threads = Annotated[int, Ge(1), Le(1024)]
Stages = Annotated[int, Ge(1), Le(10_000)]
Pixels = Annotated[int, Ge(1), Le(8192)]
Seed = Annotated[int, Ge(0), Le(2**63 - 1)]
Positive = Annotated[float, Gt(0), Le(LARGEST)]
NonNegative = Annotated[float, Ge(0), Le(LARGEST)]
Fraction = Annotated[float, Ge(0), Le(1)]
Share = Annotated[float, Gt(0), Le(1)]
OpenFraction = Annotated[float, Gt(0), Lt(1)]
Below1 = Annotated[float, Ge(0), Lt(1)]


def _is_int(value: Any, low: int = 0, most: int = MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= most


def _index(key: Any) -> int:
    """A key of a timetable: JSON has text for keys, Python may have numbers."""
    if isinstance(key, str) and re.fullmatch(r"[0-9]{1,9}", key):
        return int(key)
    if _is_int(key):
        return int(key)
    raise ValueError


def _cohort(value: Any) -> int | float:
    if _is_int(value, 1, 10**7):
        return int(value)
    if isinstance(value, float) and math.isfinite(value) and 0 < value <= 1:
        return value
    raise ValueError("must be a count of at least 1 (an integer) or a fraction in (0, 1] (a number with a point)")


def _count_or(*words: str, most: int = MOST) -> PlainValidator:
    def check(value: Any) -> Any:
        if value in words or _is_int(value, 1, most):
            return value
        bound = f"at most {most}" if _is_int(value, 1, value if isinstance(value, int) else 0) else "at least 1"
        raise ValueError(f"must be {' or '.join(words)} or a whole number of {bound}")

    return PlainValidator(check)


def _class_order(value: Any) -> Any:
    if value in ("seeded", "natural"):
        return value
    if isinstance(value, list) and value and all(_is_int(v) for v in value):
        return value
    raise ValueError("must be seeded, natural or a list of class ids")


def _arrival(value: Any) -> Any:
    if value in ("synchronous", "shifted", "per_client"):
        return value
    try:
        found = {_index(c): {_index(s): t for s, t in row.items()} for c, row in value.items()}
    except (AttributeError, TypeError, ValueError):
        found = {0: {0: None}}
    if all(_is_int(task) for row in found.values() for task in row.values()):
        return found
    raise ValueError(
        "must be synchronous, shifted, per_client or a schedule {client: {stage: task}} of whole numbers from 0"
    )


def _failure(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"fail|skip|retry\([1-9][0-9]{0,2}\)", value):
        return value
    raise ValueError("must be fail, skip or retry(n) with n in [1, 999]")


def _device(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?|mps", value):
        return value
    raise ValueError("must be auto, cpu, cuda, cuda:N or mps")


def _tracker(value: Any) -> None:
    if value is None:
        return None
    raise ValueError("must be null: this version has no trackers")


def choice_of(key: str, default: str, prefixes: tuple[str, ...] = ()) -> Discriminator:
    """Discriminator on a choice key; `flwr:Name` falls under the tag `flwr:`."""

    def tag(value: Any) -> str:
        found = value.get(key, default) if isinstance(value, dict) else getattr(value, key, default)
        return next((p for p in prefixes if isinstance(found, str) and found.startswith(p)), found)

    return Discriminator(tag)


class Section(BaseModel):
    """Base: strict types, unknown keys refused, NaN and infinity refused, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Data(Section):
    """Where examples come from. root: local mirror of hub repositories (else FEDLOOM_DATA, else the hub).

    image, label, config, train_split, test_split: columns, configuration and splits, detected when null.
    image_size: resize images to squares. test_fraction: test part of data that come without a test split.
    """

    name: str = "sklearn/digits"
    root: str | None = None
    augment: Literal["none", "flip", "crop_flip"] = "none"
    image_size: Pixels | None = None
    image: str | None = None
    label: str | None = None
    config: str | None = None
    train_split: str | None = None
    test_split: str | None = None
    test_fraction: OpenFraction = 0.2


class Static(Section):
    """All classes from the start, one stage."""

    kind: Literal["static"] = "static"


class ClassIncremental(Section):
    """Classes arrive task by task.

    shift: how many stages late a client of a `shifted` arrival may be. stages: length of an explicit schedule,
    by default up to its last entry.
    """

    kind: Literal["class_incremental"] = "class_incremental"
    tasks: Annotated[Any, _count_or("coarse", "fine")] = 5
    class_order: Annotated[Any, PlainValidator(_class_order)] = "seeded"
    arrival: Annotated[Any, PlainValidator(_arrival)] = "synchronous"
    shift: Stages = 1
    stages: Stages | None = None


class Iid(Section):
    """Every client draws from the same distribution."""

    kind: Literal["iid"] = "iid"
    clients: Clients = 10


class Dirichlet(Section):
    """Shares of every class drawn from Dir(alpha); variants as in `fedloom.data.dirichlet`."""

    kind: Literal["dirichlet"] = "dirichlet"
    clients: Clients = 10
    alpha: Positive = 0.5
    min_size: Natural = 0
    variant: Literal["balanced", "plain"] = "balanced"


class QuantityLabel(Section):
    """Every client holds alpha_q labels (or shards), by one of the three published rules."""

    kind: Literal["quantity_label"] = "quantity_label"
    clients: Clients = 10
    alpha_q: Count = 2
    qli_mode: Literal["niid_bench", "pilora_shards", "glfc_classes"] = "niid_bench"
    shard_fraction: Share = 0.8


class QuantitySkew(Section):
    """Client sizes drawn from Dir(alpha), labels alike."""

    kind: Literal["quantity_skew"] = "quantity_skew"
    clients: Clients = 10
    alpha: Positive = 0.5
    min_size: Natural = 0


class Shared(Section):
    """Client i reads `per_client` examples by index, with overlap; any number of clients."""

    kind: Literal["shared"] = "shared"
    clients: Clients = 10
    per_client: Count = 50


class FlwrPartition(Section):
    """A partitioner of flwr-datasets by class name; `options` go to its constructor."""

    kind: Annotated[str, Field(pattern=r"^flwr:\w{1,100}$")]
    clients: Clients = 10
    options: dict[str, Any] = Field(default_factory=dict)


class Model(Section):
    """A backbone by name, or a factory `package.module:attribute`. weights: path of a local state dict.

    name `auto`: mlp for vectors, digits_cnn for images below 16x16, small_cnn for all others.
    """

    name: str = "auto"
    weights: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class Sgd(Section):
    """SGD; values as in `fedloom.local.optim.SGD`."""

    name: Literal["sgd"] = "sgd"
    lr: Positive = 0.05
    momentum: Below1 = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: bool = False


class Adamw(Section):
    """AdamW; values as in `fedloom.local.optim.AdamW`."""

    name: Literal["adamw"] = "adamw"
    lr: Positive = 0.001
    betas: tuple[Below1, Below1] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.01


Per = Literal["round", "stage", "step"]


class Constant(Section):
    """Factor 1, after `warmup` units of linear warm-up."""

    name: Literal["constant"] = "constant"
    per: Per = "round"
    warmup: Natural = 0


class Drops(Constant):
    """Factor `gamma` every `step_size` units."""

    name: Literal["step"] = "step"  # type: ignore[assignment]
    step_size: Count = 1
    gamma: Positive = 0.5


class Exponential(Constant):
    """Factor `gamma` every unit."""

    name: Literal["exponential"] = "exponential"  # type: ignore[assignment]
    gamma: Positive = 0.5


class Cosine(Constant):
    """Half a cosine from 1 to `floor`."""

    name: Literal["cosine"] = "cosine"  # type: ignore[assignment]
    floor: Fraction = 0.0


class Linear(Constant):
    """A line from 1 to `floor`."""

    name: Literal["linear"] = "linear"  # type: ignore[assignment]
    floor: Fraction = 0.0


ScheduleSection = Annotated[
    Annotated[Constant, Tag("constant")]
    | Annotated[Drops, Tag("step")]
    | Annotated[Exponential, Tag("exponential")]
    | Annotated[Cosine, Tag("cosine")]
    | Annotated[Linear, Tag("linear")],
    choice_of("name", "constant"),
]
OptimizerSection = Annotated[
    Annotated[Sgd, Tag("sgd")] | Annotated[Adamw, Tag("adamw")],
    choice_of("name", "sgd"),
]
StreamSection = Annotated[
    Annotated[Static, Tag("static")] | Annotated[ClassIncremental, Tag("class_incremental")],
    choice_of("kind", "class_incremental"),
]
PartitionSection = Annotated[
    Annotated[Iid, Tag("iid")]
    | Annotated[Dirichlet, Tag("dirichlet")]
    | Annotated[QuantityLabel, Tag("quantity_label")]
    | Annotated[QuantitySkew, Tag("quantity_skew")]
    | Annotated[Shared, Tag("shared")]
    | Annotated[FlwrPartition, Tag("flwr:")],
    choice_of("kind", "dirichlet", ("flwr:",)),
]


class Training(Section):
    """What clients do. rounds: per stage. cohort: an integer is a count, a float in (0, 1] a fraction."""

    rounds: Count = 5
    cohort: Annotated[Any, PlainValidator(_cohort)] = 1.0
    local_epochs: Count = 1
    batch_size: Count = 32
    precision: Literal["fp32", "bf16"] = "fp32"
    memory_format: Literal["model", "contiguous", "channels_last"] = "model"
    clip_norm: Positive | None = None
    grad_checkpointing: bool = False
    schedule: ScheduleSection = Constant()
    optimizer: OptimizerSection = Sgd()


class Engine(Section):
    """How it runs; only `threads`, the device's kind and the failure rules can change a result.

    runtime: of the engine flower: `grid` (in this process, the default), `simulation` (Flower's own, on Ray) or
    `deployment` (what `fedloom deploy` writes). join: seconds that a federation waits for its clients to join.
    reply_limit: bytes that a client's answer may have; null is four times the server's state and 16 MiB more.
    """

    name: str = "serial"
    runtime: Literal["grid", "simulation", "deployment"] | None = None
    device: Annotated[str, PlainValidator(_device)] = "auto"
    workers: Annotated[Any, _count_or("auto", most=MOST_WORKERS)] = "auto"
    threads: Threads = 1
    on_client_failure: Annotated[str, PlainValidator(_failure)] = "skip"
    min_replies: Count = 1
    deadline: Positive | None = None
    join: Positive = 600.0
    reply_limit: Annotated[int, Ge(1), Le(2**40)] | None = None


class Evaluate(Section):
    """every: `stage`, or a number of rounds (a stage's last round always counts). personal: clients' own views."""

    every: Annotated[Any, _count_or("stage")] = "stage"
    personal: bool = True


class Checkpoint(Section):
    """every: rounds between checkpoints, 0 for none. keep: how many are kept."""

    every: Natural = 1
    keep: Count = 2


class Config(Section):
    """The whole tree. `method` holds name, preset and every option, already checked against the method."""

    method: dict[str, Any] = Field(default_factory=lambda: {"name": "fedavg"})
    data: Data = Data()
    stream: StreamSection = ClassIncremental()
    partition: PartitionSection = Dirichlet()
    model: Model = Model()
    training: Training = Training()
    engine: Engine = Engine()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    tracker: Annotated[None, PlainValidator(_tracker)] = None
    seed: Seed = 0

    def as_dict(self) -> dict[str, Any]:
        """The tree as plain JSON values, defaults included; running it again gives the same tree."""
        return self.model_dump(mode="json")


CHOICES = {
    ("method",): "name",
    ("stream",): "kind",
    ("partition",): "kind",
    ("training", "schedule"): "name",
    ("training", "optimizer"): "name",
}
NAMED = {**CHOICES, ("data",): "name", ("model",): "name", ("engine",): "name"}  # a bare name stands for these
