"""The sections of the tree as strict pydantic models; defaults live here and in `scenarios.py` and nowhere else.

Sections with a choice key (`name` or `kind`) are tagged unions: each choice knows its own options only, so
an option that the choice cannot use is refused instead of ignored. Values come in as JSON (see
`fedloom.config.resolve`): lists fit tuples, strings never pass for numbers or booleans.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Discriminator, Field, PlainValidator, Tag

from fedloom.config.scenarios import ClassIncremental, Dirichlet, PartitionSection, StreamSection
from fedloom.config.values import (
    MOST_WORKERS,
    Below1,
    Count,
    Fraction,
    Natural,
    NonNegative,
    OpenFraction,
    Pixels,
    Positive,
    Section,
    Seed,
    Threads,
    Words,
    choice_of,
    count_or,
    is_int,
)


def _cohort(value: Any) -> int | float:
    if is_int(value, 1, 10**7):
        return int(value)
    if isinstance(value, float) and math.isfinite(value) and 0 < value <= 1:
        return value
    raise ValueError("must be a count of at least 1 (an integer) or a fraction in (0, 1] (a number with a point)")


def _failure(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"fail|skip|retry\([1-9][0-9]{0,2}\)", value):
        return value
    raise ValueError("must be fail, skip or retry(n) with n in [1, 999]")


def _device(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?|mps", value):
        return value
    raise ValueError("must be auto, cpu, cuda, cuda:N or mps")


class Data(Section):
    """Where examples come from. root: local mirror of hub repositories (else FEDLOOM_DATA, else the hub).

    image: column of images, detected when null. label: column of classes, detected when null. config: configuration of
    a repository on the hub, when null its only one. train_split, test_split: name of the split, detected when null.
    domain: the column of domain labels, `folders` for folder:PATH with one folder per domain and in it one per class,
    `none` to ignore domains; null is what the catalogue says. image_size: resize images to squares.
    test_fraction: test part of data that come without a test split.
    text: column of texts to classify, detected when null. tokenizer: of texts, a path or a name of the hub; null trains
    one of at most vocab_size entries. max_length: tokens kept of a text, null: 128, or 256 of a question with
    an option. scoring: what of a question is scored, its options (`choice`) or their letters (`letter`).
    """

    name: str = "sklearn/digits"
    root: str | None = None
    augment: Literal["none", "flip", "crop_flip"] = "none"
    image_size: Pixels | None = None
    image: str | None = None
    label: str | None = None
    domain: str | None = None
    config: str | None = None
    train_split: str | None = None
    test_split: str | None = None
    test_fraction: OpenFraction = 0.2
    text: str | None = None
    tokenizer: str | None = None
    vocab_size: Annotated[int, Ge(300), Le(10**6)] = 8000
    max_length: Annotated[int, Ge(2), Le(10**5)] | None = None
    scoring: Literal["choice", "letter"] = "choice"


class Model(Section):
    """A backbone by name, or a factory `package.module:attribute`. weights: path of a local state dict.

    name `auto`: mlp for vectors, switch_encoder for texts, digits_cnn for images below 16x16, small_cnn for all others.
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
    workers: Annotated[Any, count_or("auto", most=MOST_WORKERS)] = "auto"
    threads: Threads = 1
    on_client_failure: Annotated[str, PlainValidator(_failure)] = "skip"
    min_replies: Count = 1
    deadline: Positive | None = None
    join: Positive = 600.0
    reply_limit: Annotated[int, Ge(1), Le(2**40)] | None = None


class Evaluate(Section):
    """every: `stage`, or a number of rounds (a stage's last round always counts). personal: clients' own views."""

    every: Annotated[Any, count_or("stage")] = "stage"
    personal: bool = True


class Checkpoint(Section):
    """every: rounds between checkpoints, 0 for none. keep: how many are kept."""

    every: Natural = 1
    keep: Count = 2


class Tensorboard(Section):
    """TensorBoard's event files, in the run folder. (`tracker: null`, the default, is no tracker.)"""

    name: Literal["tensorboard"] = "tensorboard"


class Wandb(Section):
    """Weights & Biases. mode: `offline` writes into the run folder, for `wandb sync`; `online` needs `wandb login`.

    group: what W&B groups runs by. entity: user or team, W&B's default when null.
    """

    name: Literal["wandb"] = "wandb"
    mode: Literal["offline", "online"] = "offline"
    project: Words = "fedloom"
    entity: Words | None = None
    group: Words | None = None
    tags: tuple[Words, ...] = ()


class Mlflow(Section):
    """MLflow. uri: of its store, or a folder; null is `mlruns` in the run folder. experiment: is made if missing."""

    name: Literal["mlflow"] = "mlflow"
    uri: Words | None = None
    experiment: Words = "fedloom"


def _tracker(value: Any) -> str:
    """The tag of a tracker; of a mapping without a name none, so that it is asked for."""
    if value is None:
        return "null"
    return str(value.get("name")) if isinstance(value, dict) else getattr(value, "name", "tensorboard")


TrackerSection = Annotated[
    Annotated[None, Tag("null")]
    | Annotated[Tensorboard, Tag("tensorboard")]
    | Annotated[Wandb, Tag("wandb")]
    | Annotated[Mlflow, Tag("mlflow")],
    Discriminator(_tracker),
]


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
    tracker: TrackerSection = None
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
    ("tracker",): "name",
}
NAMED = {**CHOICES, ("data",): "name", ("model",): "name", ("engine",): "name"}  # a bare name stands for these
