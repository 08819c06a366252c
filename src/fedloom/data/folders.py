"""Image folders -> stored inputs, labels and domains.

PATH/class/image, or with domains PATH/domain/class/image; either also below train/ and test/. A class folder may hold
folders of its own, but what looks like domains is taken for classes only where `data.domain` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.core import DataError
from fedloom.data.images import channels_of, decode
from fedloom.data.labels import index_domains, index_labels
from fedloom.data.reading import FOLDERS, NO_DOMAINS, TEST_NAMES, Reading
from fedloom.data.source import Source, assemble

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


@dataclass(frozen=True)
class Split:
    """The images of one split. files: below `root`, ascending. domains: whether the first level names the domain."""

    root: Path
    files: tuple[Path, ...]
    domains: bool

    def names(self, what: int) -> list[str]:
        """Per image, the name of its class (`what` 0) or of its domain (`what` 1)."""
        level = self.domains - what
        return [p.relative_to(self.root).parts[level] for p in self.files]

    def where(self, position: int) -> str:
        """Words that name an image in an error."""
        return f"image '{self.files[position]}'"


def list_folder(name: str, path: Path, reading: Reading) -> list[Split]:
    """Find the images of an image folder, by split: train and test, or one where it has no folder train.

    Raises `DataError` where the layout is not the one that is asked for.
    """
    if not path.is_dir():
        raise DataError(f"data.name '{name}': '{path}' is not a folder; use parquet:PATH for a parquet file")
    below = {d.name: d for d in path.iterdir() if d.is_dir() and d.name in ("train", *TEST_NAMES)}
    train, test = reading.splits(below, f"folder '{path}'") if "train" in below else (None, None)
    roots = [below[s] for s in (train, test) if s] or [path]
    found = [_split(name, root, reading.domain == FOLDERS) for root in roots]
    if reading.domain is None:
        for split in found:
            _check_classes(name, split)
    return found


def _split(name: str, root: Path, domains: bool) -> Split:
    named = (p for d in root.iterdir() if d.is_dir() for p in d.rglob("*") if p.suffix.lower() in SUFFIXES)
    found = tuple(sorted(p for p in named if not p.is_dir()))
    if not found:
        layout = "one subfolder per domain, in it one per class" if domains else "one subfolder per class"
        raise DataError(f"data.name '{name}': '{root}' holds no images in class folders ({layout})")
    missing = next((p for p in found if not p.is_file()), None)
    if missing is not None:
        raise DataError(f"image '{missing}' is a link to nothing; remove or mend it")
    _check_names(root, found)
    if domains:
        _check_levels(root, found)
    return Split(root, found, domains)


def _check_names(root: Path, files: Sequence[Path]) -> None:
    """Refuse names of folders whose bytes are no UTF-8: they are names of classes, and go into every file of a run."""
    for folder in sorted({p.parent for p in files}):
        try:
            str(folder.relative_to(root)).encode()
        except UnicodeEncodeError:
            raise DataError(f"the name of folder {str(folder)!a} is no UTF-8 text; rename it") from None


def _check_levels(root: Path, files: Sequence[Path]) -> None:
    levels = [p.relative_to(root).parts[:-1] for p in files]
    bare = next((p for p, above in zip(files, levels, strict=True) if len(above) < 2), None)
    if bare is not None:
        raise DataError(
            f"image '{bare}' lies in no class folder of its domain; data.domain 'folders' reads "
            f"{root / 'domain' / 'class' / bare.name}, so move it or unset data.domain"
        )
    if {above[1] for above in levels} <= {"train", *TEST_NAMES}:
        raise DataError(
            f"folder '{root}' has its splits below the domains; move them above (train/domain/class), or name the "
            f"domains one by one: data.name=domains:folder:{root / levels[0][0]},folder:..."
        )


def _check_classes(name: str, split: Split) -> None:
    """Refuse folders that look like domains where nobody said what they are.

    They hold no image themselves, and at least two names of folders are in more than one of them: a single one, such as
    `images`, tells no classes apart. Folders of splits do not count.
    """
    levels = [p.relative_to(split.root).parts[:-1] for p in split.files]
    below = [tuple(part for part in above[1:] if part not in ("train", *TEST_NAMES)) for above in levels]
    if not all(below):
        return
    pairs = {(above[0], names[0]) for above, names in zip(levels, below, strict=True)}
    times = Counter(names for _, names in pairs)
    common = sorted(names for names, count in times.items() if count > 1)
    if len(common) < 2:
        return
    first, second = sorted(above for above, below_it in pairs if below_it == common[0])[:2]
    raise DataError(
        f"data.name '{name}': folders '{first}' and '{second}' look like domains, since both hold folders "
        f"'{common[0]}' and '{common[1]}'; set data.domain to '{FOLDERS}' to read domain/class/image, or to "
        f"'{NO_DOMAINS}' if they are the classes"
    )


def source_from_folder(name: str, splits: Sequence[Split], reading: Reading, **extra: Any) -> Source:
    """Decode the images of an image folder. Raises `DataError` naming an image that cannot be used."""
    blobs = [[p.read_bytes for p in split.files] for split in splits]
    channels = max(channels_of(b, s.where) for b, s in zip(blobs, splits, strict=True))
    xs = [decode(b, channels, reading.image_size, s.where) for b, s in zip(blobs, splits, strict=True)]
    *ys, class_names, _ = index_labels(*(s.names(0) for s in splits), where=f"class folders of '{name}'")
    ds, domain_names, notes = [], (), []
    if splits[0].domains:
        *ds, domain_names, notes = index_domains(*(s.names(1) for s in splits), where=f"domain folders of '{name}'")
    parts = [tuple(column[i] for column in (xs, ys, ds) if column) for i in range(len(splits))]
    return assemble(
        name, parts[0], parts[1] if len(parts) > 1 else None, class_names, domain_names=domain_names, notes=notes,
        test_fraction=reading.test_fraction, split_seed=reading.split_seed, **extra,
    )  # fmt: skip
