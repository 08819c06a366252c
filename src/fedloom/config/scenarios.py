"""The sections `stream` and `partition`: how classes and domains arrive, and how examples are dealt out."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, Tag

from fedloom.config.values import Clients, Count, Natural, Positive, Section, Share, Stages, choice_of, count_or, is_int


def _index(key: Any) -> int:
    """A key of a timetable: JSON has text for keys, Python may have numbers."""
    if isinstance(key, str) and re.fullmatch(r"[0-9]{1,9}", key):
        return int(key)
    if is_int(key):
        return int(key)
    raise ValueError


def _class_order(value: Any) -> Any:
    if value in ("seeded", "natural"):
        return value
    if isinstance(value, list) and value and all(is_int(v) for v in value):
        return value
    raise ValueError("must be seeded, natural or a list of class ids")


def _domain_order(value: Any) -> Any:
    if value in ("seeded", "natural"):
        return value
    if isinstance(value, list) and value and all(isinstance(v, str) or is_int(v) for v in value):
        return value
    raise ValueError("must be seeded, natural or a list of domains by name or id")


def _arrival(value: Any) -> Any:
    if value in ("synchronous", "shifted", "per_client"):
        return value
    try:
        found = {_index(c): {_index(s): t for s, t in row.items()} for c, row in value.items()}
    except (AttributeError, TypeError, ValueError):
        found = {0: {0: None}}
    if all(is_int(task) for row in found.values() for task in row.values()):
        return found
    raise ValueError(
        "must be synchronous, shifted, per_client or a schedule {client: {stage: task}} of whole numbers from 0"
    )


class Static(Section):
    """All classes from the start, one stage."""

    kind: Literal["static"] = "static"


class ClassIncremental(Section):
    """Classes arrive task by task.

    shift: how many stages late a client of a `shifted` arrival may be. stages: length of an explicit schedule,
    by default up to its last entry.
    """

    kind: Literal["class_incremental"] = "class_incremental"
    tasks: Annotated[Any, count_or("coarse", "fine")] = 5
    class_order: Annotated[Any, PlainValidator(_class_order)] = "seeded"
    arrival: Annotated[Any, PlainValidator(_arrival)] = "synchronous"
    shift: Stages = 1
    stages: Stages | None = None


class DomainIncremental(Section):
    """Domains of the data arrive one after another, each with all classes; `shift` and `stages` as for classes."""

    kind: Literal["domain_incremental"] = "domain_incremental"
    domain_order: Annotated[Any, PlainValidator(_domain_order)] = "seeded"
    arrival: Annotated[Any, PlainValidator(_arrival)] = "synchronous"
    shift: Stages = 1
    stages: Stages | None = None


class Iid(Section):
    """Every client draws from the same distribution."""

    kind: Literal["iid"] = "iid"
    clients: Clients = 10


class Dirichlet(Section):
    """Shares of every class, or of every domain (`by`), drawn from Dir(alpha); see `fedloom.data.dirichlet`."""

    kind: Literal["dirichlet"] = "dirichlet"
    clients: Clients = 10
    alpha: Positive = 0.5
    min_size: Natural = 0
    variant: Literal["balanced", "plain"] = "balanced"
    by: Literal["class", "domain"] = "class"


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


class ByDomain(Section):
    """What the three rules over domains share.

    share: most of a domain's examples that a client gets. label_alpha: label mix inside a domain ~ Dir(label_alpha).
    """

    clients: Clients = 10
    share: Share = 1.0
    label_alpha: Positive | None = None
    min_size: Natural = 1


class KDomains(ByDomain):
    """A client holds domains_min to domains_max domains (null: all), every domain is held by at least `cover` clients
    (null: 5, or as many as can be)."""

    kind: Literal["k_domains"] = "k_domains"
    domains_min: Count = 2
    domains_max: Count | None = None
    cover: Count | None = None


class DirichletDomain(ByDomain):
    """Every client's proportions over domains drawn from Dir(alpha)."""

    kind: Literal["dirichlet_domain"] = "dirichlet_domain"
    alpha: Positive = 0.5


class Single(ByDomain):
    """One domain per client."""

    kind: Literal["single"] = "single"


class FlwrPartition(Section):
    """A partitioner of flwr-datasets by class name; `options` go to its constructor."""

    kind: Annotated[str, Field(pattern=r"^flwr:\w{1,100}$")]
    clients: Clients = 10
    options: dict[str, Any] = Field(default_factory=dict)


StreamSection = Annotated[
    Annotated[Static, Tag("static")]
    | Annotated[ClassIncremental, Tag("class_incremental")]
    | Annotated[DomainIncremental, Tag("domain_incremental")],
    choice_of("kind", "class_incremental"),
]
PartitionSection = Annotated[
    Annotated[Iid, Tag("iid")]
    | Annotated[Dirichlet, Tag("dirichlet")]
    | Annotated[QuantityLabel, Tag("quantity_label")]
    | Annotated[QuantitySkew, Tag("quantity_skew")]
    | Annotated[Shared, Tag("shared")]
    | Annotated[KDomains, Tag("k_domains")]
    | Annotated[DirichletDomain, Tag("dirichlet_domain")]
    | Annotated[Single, Tag("single")]
    | Annotated[FlwrPartition, Tag("flwr:")],
    choice_of("kind", "dirichlet", ("flwr:",)),
]
