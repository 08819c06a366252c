"""Data sets known by name: where they live on the hub, their columns, splits, statistics and task counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TEN = {"coarse": 3, "fine": 5}  # FedCBDR's two splits of CIFAR-10, taken for every set of ten classes


@dataclass(frozen=True)
class Entry:
    """One data set of the catalogue.

    hub: repository on the Hugging Face hub. statistics: published (mean, std) per channel, else measured on the
    train split. test_split None: a fixed stratified part of the train split. granularity: named task counts.
    domain: column of the domain labels, None for data without domains. text: column of texts to classify.
    """

    hub: str
    what: str
    image: str | None = None
    label: str | None = None
    domain: str | None = None
    config: str | None = None
    train_split: str | None = "train"
    test_split: str | None = "test"
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    granularity: Mapping[str, int] = field(default_factory=dict)
    text: str | None = None


_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_TINY = ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))

DIGITS, DIGITS_DOMAINS = "sklearn/digits", "sklearn/digits-domains"
BUNDLED = (DIGITS, DIGITS_DOMAINS)  # come with scikit-learn

ENTRIES: Mapping[str, Entry] = {
    entry.hub: entry
    for entry in (
        Entry(DIGITS, "digits, 8x8 grey, 10 classes, ships with scikit-learn: no download", granularity=TEN),
        Entry(
            DIGITS_DOMAINS, "the same digits in four domains: rotated, inverted, noisy, blurred; no download",
            granularity=TEN,
        ),
        Entry(
            "uoft-cs/cifar10", "CIFAR-10, 32x32 RGB, 10 classes", "img", "label", config="plain_text",
            statistics=_CIFAR10, granularity=TEN,
        ),
        Entry(
            "uoft-cs/cifar100", "CIFAR-100, 32x32 RGB, 100 classes", "img", "fine_label", config="cifar100",
            statistics=_CIFAR100, granularity={"coarse": 5, "fine": 10},
        ),
        Entry(
            "zh-plus/tiny-imagenet", "Tiny ImageNet, 64x64 RGB, 200 classes", "image", "label",
            test_split="valid", statistics=_TINY, granularity={"coarse": 10, "fine": 20},
        ),
        Entry(
            "wltjr1007/DomainNet", "DomainNet, six visual domains, RGB of many sizes, 345 classes", "image", "label",
            "domain", granularity={"coarse": 5, "fine": 10},
        ),
        Entry(
            "ylecun/mnist", "MNIST digits, 28x28 grey, 10 classes", "image", "label", config="mnist", granularity=TEN
        ),
        Entry(
            "zalando-datasets/fashion_mnist", "Fashion-MNIST, 28x28 grey, 10 classes", "image", "label",
            config="fashion_mnist", granularity=TEN,
        ),
        Entry(
            "ufldl-stanford/svhn", "street view house numbers, 32x32 RGB, 10 classes", "image", "label",
            config="cropped_digits", granularity=TEN,
        ),
        Entry("flwrlabs/usps", "USPS digits, 16x16 grey, 10 classes", "image", "label", granularity=TEN),
        Entry("Mike0307/MNIST-M", "MNIST-M digits on photographs, 32x32 RGB", "image", "label", granularity=TEN),
        Entry(
            "flwrlabs/pacs", "PACS, four visual domains, RGB, 7 classes", "image", "label", "domain", test_split=None
        ),
        Entry("fancyzhx/ag_news", "AG News, news texts, 4 classes", label="label", text="text"),
        Entry(
            "cais/mmlu", "MMLU, questions with 4 options, 57 subjects as domains", label="answer", domain="subject",
            config="all", train_split="test", test_split=None,
        ),
        Entry(
            "Rowan/hellaswag", "HellaSwag, situations with 4 endings, activities as domains", label="label",
            domain="activity_label", train_split="validation", test_split=None,
        ),
    )
}  # fmt: skip

ALIASES: Mapping[str, str] = {hub.rsplit("/", 1)[1].lower(): hub for hub in ENTRIES}


def catalogue() -> list[tuple[str, str]]:
    """(name, what it is) of every data set known by name, and of the forms that read the user's own data."""
    known = [(entry.hub, entry.what) for entry in ENTRIES.values()]
    return [
        *known,
        ("OWNER/NAME", "any image or text data set of the hub, or of the mirror that data.root names"),
        (
            "folder:PATH",
            "image folder, one subfolder per class, optionally under train/ and test/; data.domain=folders: "
            "one subfolder per domain, in it one per class",
        ),
        (
            "parquet:PATH",
            "parquet file or folder with a label column and an image column, a text column or numeric columns, or with "
            "question, choices and answer",
        ),
        ("domains:NAME,NAME", "data sets of the same classes as the domains of one, such as domains:mnist,usps"),
    ]
