"""A data set in memory: stored inputs, class ids, domain ids, names and statistics."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core import DataError
from fedloom.core.seeds import seed_for
from fedloom.data.cache import Cache, default_folder
from fedloom.data.text import Text

FIELDS = ("x_train", "y_train", "x_test", "y_test")
DOMAINS = ("domains_train", "domains_test")

Split = tuple[np.ndarray, ...]  # stored inputs, class ids and, where the data have domains, domain ids


@dataclass(frozen=True, eq=False)
class Source:
    """Stored inputs and labels of one data set; tensors may be memory-mapped and are never written.

    x_*: uint8 [n, channels, height, width] for images, int32 for texts (see `fedloom.data.text.Text`), float32
    otherwise; y_*: int64 [n], ids of `class_names`. text: what the texts are and their tokeniser, None without texts.
    mean, std: per channel, of inputs scaled to [0, 1]; empty where inputs are used as they are.
    fingerprint: SHA-256 of tensors, names and statistics. granularity: task counts by name ("coarse", "fine").
    domains_train, domains_test: int64 [n], ids of `domain_names`; None and empty where the data have no domains.
    notes: sentences on what was changed while reading. cache: folder for hand-over to other processes.

    Pickling writes the tensors to the content cache once and passes a reference, so that every process maps the
    same pages; where the cache cannot be written, the tensors themselves travel.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    domains_train: Tensor | None = None
    domains_test: Tensor | None = None
    domain_names: tuple[str, ...] = ()
    text: Text | None = None
    granularity: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cache: Path | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one stored input."""
        return tuple(self.x_train.shape[1:])

    def without_domains(self) -> Source:
        """The same examples as data that have no domains."""
        plain = replace(self, domains_train=None, domains_test=None, domain_names=())
        return self if self.domains_train is None else replace(plain, fingerprint=_fingerprint(plain))

    def save(self) -> bool:
        """Write the tensors to the content cache unless they are there; False where it cannot be written."""
        store = Cache(self.cache or default_folder())
        return store.read(self.fingerprint) is not None or store.write(self.fingerprint, *self._content())

    def _content(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        names = FIELDS if self.domains_train is None else (*FIELDS, *DOMAINS)
        arrays = {name: getattr(self, name).numpy() for name in names}
        meta: dict[str, Any] = {
            "class_names": list(self.class_names),
            "mean": list(self.mean),
            "std": list(self.std),
        }
        if self.text is not None:
            meta["text"] = self.text.as_dict()
        return arrays, meta if self.domains_train is None else meta | {"domain_names": list(self.domain_names)}

    def __reduce__(self) -> tuple[Any, ...]:
        extra = {"name": self.name, "granularity": dict(self.granularity), "notes": self.notes, "cache": self.cache}
        if self.save():
            return _from_cache, (self.fingerprint, str(self.cache or default_folder()), extra)
        arrays, meta = self._content()
        return _from_arrays, (self.fingerprint, arrays, meta, extra)


def _from_arrays(fingerprint: str, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], extra: Any) -> Source:
    tensors = {name: torch.from_numpy(arrays[name]) for name in _fields(meta)}
    about = {name: tuple(values) for name, values in meta.items() if name != "text"}
    text = Text(**meta["text"]) if "text" in meta else None
    return Source(**tensors, **about, text=text, fingerprint=fingerprint, **extra)


def _fields(meta: Mapping[str, Any]) -> tuple[str, ...]:
    return (*FIELDS, *DOMAINS) if "domain_names" in meta else FIELDS


def _from_cache(fingerprint: str, folder: str, extra: Any) -> Source:
    found = restore(fingerprint, Cache(Path(folder)), **extra)
    if found is None:
        raise DataError(f"cached data {fingerprint[:12]} are no longer in '{folder}'; start the run again")
    return found


def restore(fingerprint: str, store: Cache, **extra: Any) -> Source | None:
    """Open a source from the cache, memory-mapped; None when it is absent or damaged.

    extra: `name`, `granularity`, `notes`, `cache` of the source.
    """
    found = store.read(fingerprint)
    if found is None or any(name not in found[0] for name in _fields(found[1])):
        return None
    return _from_arrays(fingerprint, *found, extra)


def assemble(
    name: str,
    train: Split,
    test: Split | None,
    class_names: Sequence[str],
    *,
    domain_names: Sequence[str] = (),
    statistics: tuple[Sequence[float], Sequence[float]] | None = None,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    notes: Sequence[str] = (),
    **extra: Any,
) -> Source:
    """Check both splits, split off a test set where none is given, take statistics and the fingerprint.

    train, test: (stored inputs, class ids) or (stored inputs, class ids, domain ids); a split that is taken off holds
    the same share of every class, and with domains of every class of every domain. statistics: (mean, std), measured
    on the train split when None. Raises `DataError` for empty or unequal splits and for NaN or infinite inputs.
    """
    for split, part in (("train", train), ("test", test)):
        if part is not None:
            _check(name, split, *part)
    if test is None:
        taken = held_out(*train[1:], fraction=test_fraction, seed=split_seed, where=name)
        train, test = tuple(part[~taken] for part in train), tuple(part[taken] for part in train)
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"data '{name}': train inputs have shape {train[0].shape[1:]} and test inputs {test[0].shape[1:]}; "
            "give both the same shape (data.image_size resizes images)"
        )
    fields = (*FIELDS[:2], DOMAINS[0], *FIELDS[2:], DOMAINS[1]) if domain_names else FIELDS
    tensors = dict(zip(fields, map(_tensor, (*train, *test)), strict=True))
    mean, std = measure(tensors["x_train"]) if statistics is None else statistics
    source = Source(
        name=name, **tensors, class_names=tuple(class_names), mean=tuple(map(float, mean)), std=tuple(map(float, std)),
        fingerprint="", domain_names=tuple(domain_names), notes=tuple(notes), **extra,
    )  # fmt: skip
    return replace(source, fingerprint=_fingerprint(source))


def _tensor(array: np.ndarray) -> Tensor:
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _check(name: str, split: str, x: np.ndarray, *ids: np.ndarray) -> None:
    for what, values in zip(("labels", "domain labels"), ids, strict=False):
        if len(x) != len(values):
            raise DataError(
                f"data '{name}': the {split} split has {len(x)} inputs but {len(values)} {what}; make them equal"
            )
    if len(x) == 0:
        raise DataError(f"data '{name}': the {split} split is empty; it needs at least one example")
    if x.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))
        if len(bad):
            raise DataError(
                f"data '{name}': {len(bad)} {split} inputs hold NaN or infinite values, the first at position "
                f"{bad[0]}; fill or drop them"
            )


def held_out(y: np.ndarray, domains: np.ndarray | None = None, *, fraction: float, seed: int, where: str) -> np.ndarray:
    """bool [n]: the test split, `fraction` of every class (of every domain); each keeps a training example.

    The draw depends on `seed` alone, never on the seed of a run: all runs are tested on the same examples.
    """
    if not 0 < fraction < 1:
        raise DataError(f"data.test_fraction must be in (0, 1), got {fraction}")
    rng = np.random.default_rng(seed_for(seed, "test-split"))
    taken = np.zeros(len(y), dtype=bool)
    cells = y if domains is None else domains * (y.max() + 1) + y
    for cell in np.unique(cells):
        rows = np.flatnonzero(cells == cell)
        count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
        taken[rng.permutation(rows)[:count]] = True
    if not taken.any():
        cell = "class" if domains is None else "class and domain"
        raise DataError(f"data '{where}' has one example per {cell}, so no test split can be taken; pass one")
    return taken


def measure(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 inputs scaled to [0, 1]; nothing for float inputs.

    From whole-number sums over the 256 possible values, so that every processor finds the same bits, which the
    fingerprint holds. Inputs without a channel dimension get one number. A constant channel gets the deviation 1.
    """
    if x.dtype != torch.uint8:
        return (), ()
    channels = x.shape[1] if x.dim() == 4 else 1
    counts = torch.zeros(channels, 256, dtype=torch.int64)
    for part in x.split(4096):
        planes = part.transpose(0, 1).reshape(channels, -1) if x.dim() == 4 else part.reshape(1, -1)
        counts += torch.stack([torch.bincount(plane, minlength=256) for plane in planes])
    mean, std = zip(*map(_moments, counts.tolist()), strict=True)
    return tuple(mean), tuple(std)


def _moments(counts: Sequence[int]) -> tuple[float, float]:
    """Mean and deviation of k / 255 over counts of k = 0 ... 255; Python's whole numbers are exact."""
    number = max(sum(counts), 1)
    first = sum(k * count for k, count in enumerate(counts))
    second = sum(k * k * count for k, count in enumerate(counts))
    std = math.sqrt(second * number - first * first) / (255 * number)
    return first / (255 * number), std if std > 1e-6 else 1.0


def _fingerprint(source: Source) -> str:
    arrays, meta = source._content()
    sha = hashlib.sha256(repr(sorted(meta.items())).encode())
    for name, array in arrays.items():
        sha.update(f"\x1e{name}\x1f{array.dtype}\x1f{array.shape}\x1f".encode())
        sha.update(memoryview(array.reshape(-1).view(np.uint8)))
    return sha.hexdigest()
