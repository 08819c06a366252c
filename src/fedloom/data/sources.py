"""`load_source`: a name, a path or arrays -> a data set in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core import DataError
from fedloom.core.errors import unknown
from fedloom.data.arrays import from_arrays
from fedloom.data.cache import Cache, default_folder, digest
from fedloom.data.catalogue import ALIASES, BUNDLED, DIGITS, ENTRIES, Entry
from fedloom.data.folders import list_folder, source_from_folder
from fedloom.data.hub import offline_unless_reached, quiet
from fedloom.data.images import to_size
from fedloom.data.reading import FOLDERS, NO_DOMAINS, TEST_NAMES, Reading, TextReading
from fedloom.data.renderings import RENDERINGS, rendered
from fedloom.data.source import Source, assemble, held_out, restore
from fedloom.data.tables import Table, read_parquet, source_from_tables, split_files
from fedloom.data.tokens import read_tokenizer
from fedloom.data.union import domain_names, union

VERSION = 2  # of the decoding; part of every key, so that tensors of an older decoding are never served


def load_source(
    name: Any,
    *,
    root: str | Path | None = None,
    cache: str | Path | None = None,
    image: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    config: str | None = None,
    train_split: str | None = None,
    test_split: str | None = None,
    image_size: int | Sequence[int] | None = None,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    text: str | None = None,
    tokenizer: str | None = None,
    vocab_size: int = 8000,
    max_length: int | None = None,
    scoring: str = "choice",
) -> Source:
    """Load a data set.

    name: a name of the catalogue or of the hub ("uoft-cs/cifar100"), "folder:PATH", "parquet:PATH",
    "domains:NAME,NAME" (data sets that are the domains of one), "stored:FINGERPRINT" (see `store_source`), or arrays,
    tensors or torch datasets (see `from_arrays`).
    root: local mirror of hub repositories, `FEDLOOM_DATA` by default; without one the hub and its cache are used.
    cache: folder of decoded tensors, `FEDLOOM_CACHE` or `~/.cache/fedloom` by default.
    image, label, config, train_split, test_split: columns, configuration and splits; detected when None.
    domain: the column of domain labels, "folders" for folder:PATH whose first level is the domain and whose second
    the class, "none" to ignore domains; None is what the catalogue says, and for folder:PATH that the first level is
    the class, which is refused where it looks like domains. image_size: resize images.
    test_fraction, split_seed: the test part of data without a test split.
    text: the column of texts to classify. tokenizer: of texts, a `tokenizer.json`, a folder that holds one or a
    repository of the hub; None trains one of at most vocab_size entries on the training split. max_length: tokens kept
    of a text, by default 128, or 256 of a question with an option. scoring: of questions, "choice" or "letter" (see
    `fedloom.data.text.Text`).
    Raises `DataError` that names what is missing or broken and how to mend it.
    """
    words = None if tokenizer is None or _kind(str(name)) == "stored" else read_tokenizer(tokenizer)
    reading = Reading(
        image, label, domain, config, train_split, test_split, to_size(image_size), test_fraction, split_seed,
        text=TextReading(text, words, vocab_size, max_length, scoring),
    )  # fmt: skip
    store = Cache(Path(cache) if cache else default_folder())
    keep = {"cache": Path(cache) if cache else None}
    shown = name if isinstance(name, str) else "arrays"
    _check_domain(shown, reading.domain)
    if not isinstance(name, str):
        found = from_arrays(name, test_fraction=test_fraction, split_seed=split_seed, text=reading.text, **keep)
    else:
        found = _named(name, root or os.environ.get("FEDLOOM_DATA"), reading, store, keep)
    found = found.without_domains() if reading.domain == NO_DOMAINS else found
    return replace(found, notes=(*found.notes, *_unused(shown, reading), *_unused_of_texts(shown, found, reading)))


def _kind(name: str) -> str:
    """The scheme of a name, or "bundled", or the name itself."""
    return "bundled" if ALIASES.get(name.lower(), name) in BUNDLED else name.partition(":")[0]


def _check_domain(name: str, domain: str | None) -> None:
    if domain in (None, NO_DOMAINS):
        return
    if _kind(name) == "folder" and domain != FOLDERS:
        raise DataError(
            f"data.domain must be '{FOLDERS}' (the first level of the folder), '{NO_DOMAINS}' or null for "
            f"data '{name}', got '{domain}'"
        )
    if _kind(name) in ("arrays", "bundled", "stored", "domains"):
        raise DataError(
            f"data.domain '{domain}' names no column of data '{name}', which come without columns; leave it unset"
        )


def _unused(name: str, reading: Reading) -> list[str]:
    """One sentence per option of the section that data of this kind have no use for."""
    tables = ("image", "label", "config", "train_split", "test_split")
    every = dict.fromkeys(("arrays", "bundled", "stored"), (*tables, "image_size"))
    every |= {"folder": tables[:3], "parquet": ("config",)}
    given = [key for key in every.get(_kind(name), ()) if getattr(reading, key) is not None]
    return [f"data.{key} is not used by data '{name}'" for key in given]


def _unused_of_texts(name: str, source: Source, reading: Reading) -> list[str]:
    """One sentence per option of texts that is set and has no use, and per option of images where there are texts."""
    given = [key for key, value in vars(reading.text).items() if value != getattr(TextReading(), key)]
    if source.text is not None:
        trained, choices = reading.text.tokenizer is None, source.text.kind == "choices"
        idle = [key for key in given if (key == "vocab_size" and not trained) or (key == "scoring" and not choices)]
        idle += ["column"] if reading.text.column is not None and _kind(name) in ("arrays", "stored") else []
        idle += ["image_size"] if reading.image_size is not None else []
    else:
        idle = given
    return [f"data.{'text' if key == 'column' else key} is not used by data '{name}'" for key in idle]


def _named(name: str, root: str | Path | None, reading: Reading, store: Cache, keep: Mapping[str, Any]) -> Source:
    scheme, _, rest = name.partition(":")
    if scheme == "stored":
        return _stored(rest, store, keep)
    if scheme == "folder":
        return _folder(name, _path(name, rest), reading, store, keep)
    if scheme == "parquet":
        return _parquet(name, _path(name, rest), reading, store, keep)
    if scheme == "domains":
        return _union(name, rest.split(","), root, reading, store, keep)
    hub = ALIASES.get(name.lower(), name)
    if hub in BUNDLED:
        return _bundled(hub, reading, store, keep)
    if hub not in ENTRIES and not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", hub, re.ASCII):
        short = name if len(name) <= 60 else f"{name[:57]}..."
        raise DataError(unknown("data set", short, [*ENTRIES, "folder:PATH", "parquet:PATH", "domains:NAME,NAME"]))
    return _repository(hub, root, reading, store, keep)


def store_source(source: Source) -> str:
    """Keep a source in the content cache and return its name for `load_source`.

    Raises `DataError` when the cache folder cannot be written.
    """
    folder = source.cache or default_folder()
    if not source.save():
        raise DataError(f"cache folder '{folder}' cannot be written; set FEDLOOM_CACHE to a folder that can")
    Cache(folder).remember(f"stored-{source.fingerprint}", {"notes": list(source.notes), "name": source.name})
    return f"stored:{source.fingerprint}"


def _stored(fingerprint: str, store: Cache, keep: Mapping[str, Any]) -> Source:
    about = store.recall(f"stored-{fingerprint}") if fingerprint.isalnum() else None
    found = about and restore(fingerprint, store, name=about["name"], notes=tuple(about["notes"]), **keep)
    if not found:
        raise DataError(
            f"data.name 'stored:{fingerprint[:12]}' is not in the cache folder '{store.folder}'; pass the arrays again"
        )
    return found


def _through_cache(store: Cache, key: Any, build: Callable[[], Source], extra: Mapping[str, Any]) -> Source:
    """Open what an earlier call decoded, or decode, keep, and open it mapped so that processes share its pages."""
    name = digest([VERSION, key])
    known = store.recall(name)
    if known and isinstance(known.get("fingerprint"), str):
        found = restore(known["fingerprint"], store, notes=tuple(known.get("notes", ())), **extra)
        if found is not None:
            return found
    source = build()
    if not source.save():
        return source
    store.remember(name, {"fingerprint": source.fingerprint, "notes": list(source.notes)})
    return restore(source.fingerprint, store, notes=source.notes, **extra) or source


def _path(name: str, text: str) -> Path:
    path = _expanded("data.name", text)
    try:
        there = bool(text) and path.exists()
    except (OSError, ValueError):  # too long a name, a null byte
        there = False
    if not there:
        raise DataError(f"data.name '{name[:200]}': there is nothing at that path; give the path of existing data")
    return path


def _expanded(key: str, text: str | Path) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise DataError(f"{key}: the user of '{text}' has no home folder here; write the path out") from error


def _bundled(hub: str, reading: Reading, store: Cache, keep: Mapping[str, Any]) -> Source:
    from importlib.metadata import version

    extra = {"name": hub, "granularity": dict(ENTRIES[hub].granularity), **keep}
    split = {"test_fraction": reading.test_fraction, "split_seed": reading.split_seed}

    def build() -> Source:
        from sklearn.datasets import load_digits

        found = load_digits()
        x = np.round(found.images * (255 / 16)).astype(np.uint8)[:, None]
        y = found.target.astype(np.int64)
        names = [str(c) for c in range(10)]
        if hub == DIGITS:
            return assemble(train=(x, y), test=None, class_names=names, **split, **extra)
        taken = held_out(y, fraction=reading.test_fraction, seed=reading.split_seed, where=hub)
        parts = {"train": rendered(x, y, ~taken), "test": rendered(x, y, taken)}
        return assemble(**parts, class_names=names, domain_names=tuple(RENDERINGS), **extra)

    key = [hub.rpartition("/")[2], version("scikit-learn"), reading.test_fraction, reading.split_seed]
    return _through_cache(store, key, build, extra)


def _union(
    name: str, given: Sequence[str], root: str | Path | None, reading: Reading, store: Cache, keep: Mapping[str, Any]
) -> Source:
    wanted = [part.strip() for part in given if part.strip()]
    if len(wanted) < 2:
        raise DataError(f"data.name '{name}' needs two data sets or more: write domains:NAME,NAME")
    plain = replace(reading, domain=NO_DOMAINS)
    parts = [_named(part, root, plain, store, keep).without_domains() for part in wanted]
    parts = [
        replace(found, notes=(*found.notes, *_unused(part, reading))) for part, found in zip(wanted, parts, strict=True)
    ]
    granularity = next((dict(part.granularity) for part in parts if part.granularity), {})
    extra = {"name": name, "granularity": granularity, **keep}
    key = ["domains", [part.fingerprint for part in parts], domain_names(name, parts), [p.notes for p in parts]]
    return _through_cache(store, key, lambda: union(parts=parts, **extra), extra)


def _parquet(name: str, path: Path, reading: Reading, store: Cache, keep: Mapping[str, Any]) -> Source:
    base = path if path.is_dir() else path.parent
    files = sorted(p for p in path.rglob("*.parquet") if p.is_file()) if path.is_dir() else [path]
    if not files:
        raise DataError(f"data.name '{name}': folder '{path}' holds no parquet file")
    return _from_parquet(files, base, reading, store, {"name": name, **keep})


def _from_parquet(
    files: Sequence[Path], base: Path, reading: Reading, store: Cache, extra: Mapping[str, Any], **more: Any
) -> Source:
    def build() -> Source:
        tables = {split: read_parquet(part) for split, part in split_files(files, base).items()}
        return source_from_tables(tables=tables, reading=reading, **extra, **more)

    key = ["tables", store.content_hash(files, base), reading.key(), more.get("statistics")]
    return _through_cache(store, key, build, extra)


def _repository(hub: str, root: str | Path | None, reading: Reading, store: Cache, keep: Mapping[str, Any]) -> Source:
    entry = ENTRIES.get(hub, Entry(hub, "", train_split=None, test_split=None))
    given = {k: v for k, v in vars(reading).items() if v is not None}
    known = {k: getattr(entry, k) for k in ("image", "label", "domain", "config", "train_split", "test_split")}
    given["text"] = replace(reading.text, column=reading.text.column or entry.text)
    reading = replace(Reading(**(known | given)), single=hub in ENTRIES and entry.test_split is None)
    extra = {"name": hub, "granularity": dict(entry.granularity), **keep}
    if root is None:
        return _from_hub(hub, reading, store, extra, entry.statistics)
    base = _expanded("data.root", root) / hub
    try:
        files = sorted(p for p in base.rglob("*.parquet") if p.is_file())
    except OSError as error:
        raise DataError(f"data.root '{str(root)[:200]}' cannot be read: {error.strerror}; name another") from error
    if not files:
        raise DataError(
            f"data.root '{root}' has no data set '{hub}': no parquet file in '{base}'. Fetch it there with "
            f"'hf download {hub} --repo-type dataset --local-dir {base}', or unset data.root and FEDLOOM_DATA to use "
            "the hub"
        )
    files = _of_config(hub, files, base, reading.config)
    return _from_parquet(files, base, reading, store, extra, statistics=entry.statistics)


def _of_config(hub: str, files: Sequence[Path], base: Path, config: str | None) -> list[Path]:
    """Keep the files of one configuration; repositories with one have no folder for it, or a folder of its name."""
    chosen = [p for p in files if config in p.relative_to(base).parts[:-1]]
    if chosen:
        return chosen
    folders = sorted({"/".join(p.relative_to(base).parts[:-1]) for p in files})
    if config is not None and hub not in ENTRIES:
        raise DataError(f"data '{hub}' has no configuration '{config}' in '{base}'; found: {', '.join(folders)}")
    if len({f for f in folders if f.rsplit("/", 1)[-1] not in ("train", *TEST_NAMES)}) > 1:
        raise DataError(f"data '{hub}' has several configurations; set data.config to one of: {', '.join(folders)}")
    return list(files)


def _from_hub(hub: str, reading: Reading, store: Cache, extra: Mapping[str, Any], statistics: Any) -> Source:
    """Read through the `datasets` library; a second start finds its Arrow files and does not import it."""
    memo = digest(["hub", hub, reading.config, os.environ.get("HF_HOME"), os.environ.get("HF_DATASETS_CACHE")])
    key = _hub_key((store.recall(memo) or {}).get("files"), reading, store, statistics)
    tables: dict[str, Table] = {}
    if key is None:
        tables, files = _hub_tables(hub, reading.config)
        store.remember(memo, {"files": files})
        key = _hub_key(files, reading, store, statistics) or ["hub", hub, os.urandom(16).hex()]

    def build() -> Source:
        found = tables or _hub_tables(hub, reading.config)[0]
        return source_from_tables(tables=found, reading=reading, statistics=statistics, **extra)

    return _through_cache(store, key, build, extra)


def _hub_key(files: Sequence[str] | None, reading: Reading, store: Cache, statistics: Any) -> list[Any] | None:
    paths = [Path(f) for f in files or ()]
    if not paths or not all(p.is_file() for p in paths):
        return None
    shared = Path(os.path.commonpath([p.parent for p in paths]))
    return ["hub", store.content_hash(paths, shared), reading.key(), statistics]


def _hub_tables(hub: str, config: str | None) -> tuple[dict[str, Table], list[str]]:
    import datasets

    try:
        with offline_unless_reached(), quiet("huggingface_hub", "datasets"):
            found = datasets.load_dataset(hub, config)
    except Exception as error:  # the library raises many kinds: offline, missing, gated, unknown configuration
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"data.name '{hub}' is neither in the Hugging Face cache nor to be had from the hub ({reason}); check the "
            "name and the network, or name a local mirror with data.root or FEDLOOM_DATA"
        ) from error
    tables = {}
    for split, part in found.items():
        for column, feature in part.features.items():
            if isinstance(feature, datasets.Image):
                part = part.cast_column(column, datasets.Image(decode=False))
        arrow = part.with_format("arrow")[:]
        tables[str(split)] = Table(arrow, part.features.to_dict(), _row_of(hub, str(split)))
    return tables, sorted(f["filename"] for part in found.values() for f in part.cache_files)


def _row_of(hub: str, split: str) -> Callable[[int], str]:
    return lambda row: f"row {row} of split '{split}' of '{hub}'"


def _folder(name: str, path: Path, reading: Reading, store: Cache, keep: Mapping[str, Any]) -> Source:
    splits = list_folder(name, path, reading)
    key = ["folder", store.content_hash([p for split in splits for p in split.files], path), reading.key()]
    return _through_cache(store, key, lambda: source_from_folder(name, splits, reading, **keep), {"name": name, **keep})
