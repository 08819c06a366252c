"""How much of a client's pictures can be read off what it sends: the reconstruction attack of `fedloom.privacy`.

The server knows the frozen CLIP and the prompt, and sees either the feature summary of Fed-Duet (the mean feature of a
batch, with or without noise) or the update of a prompt by one gradient step. With a batch of one nothing is averaged.

    python benchmarks/inversion.py [--batch 8] [--seeds 3] [--steps 2000] [--weights PATH|random] [--data-root DIR]

Prints, as means over pictures and seeds with the deviation (ddof 1) over seeds, PSNR in dB and SSIM of reconstructions
matched with the pictures, beside two baselines that no attack is needed for: other pictures of the same data set, and
the mean picture. An attack that stays at these has read nothing. Random weights only try the script: an untrained tower
makes almost the same feature of every picture, so that there is nothing to read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from measure import show
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedloom.data import load_source
from fedloom.data.words import class_words
from fedloom.models.clip.network import Clip, ClipNetwork
from fedloom.models.clip.pictures import renormalized
from fedloom.models.clip.prompted import Prompted
from fedloom.models.spec import NetworkSpec
from fedloom.privacy.inversion import Inversion, gradient, likeness, mean_feature

DATA, SIGMA, CONTEXT = "uoft-cs/cifar100", 0.1, 4

Seen = Callable[[Tensor], Tensor]
Numbers = tuple[float, float]


def pictures(root: str | None) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Test pictures [n, 3, 32, 32] in [0, 1], their labels, and the words of the classes."""
    source = load_source(DATA, root=root)
    x, y = torch.as_tensor(source.x_test), torch.as_tensor(source.y_test)
    return x.float() / 255, y.long(), class_words(source.class_names, data=DATA, root=root)


def frozen(words: tuple[str, ...], weights: str | None) -> Clip:
    """The CLIP; pictures come with values in [0, 1]."""
    statistics = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return NetworkSpec("clip_small", len(words), (3, 32, 32), 0, weights, words=words, **statistics).clip()


def feature_function(clip: Clip) -> Seen:
    """Pictures in [0, 1] -> features [n, d], with gradient."""
    towers = clip.towers

    def features(x: Tensor) -> Tensor:
        tokens = towers.image_start(renormalized(x, clip.normalize), len(towers.image_blocks))
        return towers.image_end(tokens)

    return features


def prompt_updates(clip: Clip) -> Callable[[Tensor], Seen]:
    """Labels -> pictures -> the gradient of the cross-entropy over all classes by the context vectors of a prompt.

    By way of the gradient by the texts' features: how these depend on the prompt is the same for all pictures.
    """
    network: ClipNetwork = Prompted(CONTEXT)(clip).eval()
    features, phrases = feature_function(clip), network.phrases.of(network.shown)
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        texts, _ = clip.towers.text(clip.towers.embedded(phrases, network.context), phrases.eot)
        slopes = jacobian(texts, network.context)
    texts = texts.detach().requires_grad_()

    def of(y: Tensor) -> Seen:
        by_texts = gradient(lambda x: F.cross_entropy(network.similarity(features(x), texts), y), [texts])
        return lambda x: by_texts(x) @ slopes

    return of


def jacobian(out: Tensor, of: Any) -> Tensor:
    """Derivatives of all entries of `out` by all of `of`, [entries of `out`, entries of `of`]."""
    weights = torch.zeros_like(out, requires_grad=True)
    (back,) = torch.autograd.grad(out, [of], weights, create_graph=True)
    columns = [torch.autograd.grad(one, [weights], retain_graph=True)[0].flatten() for one in back.flatten()]
    return torch.stack(columns, 1)


def noisy(vector: Tensor, seed: int) -> Tensor:
    """What a client with the noise of Fed-Duet's `noise_sigma` sends."""
    rng = torch.Generator().manual_seed(seed)
    return vector + SIGMA * torch.randn(vector.shape, generator=rng)


@dataclass(frozen=True)
class Setting:
    """What the attacker knows and what there is to attack. summary, update: what clients compute."""

    x: Tensor
    y: Tensor
    summary: Seen
    update: Callable[[Tensor], Seen]
    attack: Inversion

    def observations(self, rows: Tensor, seed: int) -> Iterator[tuple[str, Seen, Tensor]]:
        """Name, what the client computes, and what the attacker sees of these pictures."""
        x, update = self.x[rows], self.update(self.y[rows])
        yield "feature summary", self.summary, self.summary(x)
        yield f"feature summary, noise {SIGMA}", self.summary, noisy(self.summary(x), seed)
        yield "prompt update", update, update(x)


def one_seed(setting: Setting, batch: int, seed: int) -> dict[str, Numbers]:
    """Name -> mean PSNR and SSIM of the attacks on one batch, and of the baselines."""
    x, rng = setting.x, torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=rng)
    ours, theirs = order[:batch], order[batch : 2 * batch]
    found = {"other pictures": x[theirs], "mean picture": x.mean(0).expand(batch, -1, -1, -1)}
    for name, seen, observed in setting.observations(ours, seed):
        found[name] = setting.attack(seen, observed, x[ours].shape, seed)
    compared = {name: likeness(guess, x[ours]) for name, guess in found.items()}
    return {name: (float(like.psnr.mean()), float(like.ssim.mean())) for name, like in compared.items()}


def spread(values: list[float], digits: int) -> str:
    """Mean and, over several seeds, the deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def main() -> None:
    """Run the attacks and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tv", type=float, default=Inversion().tv)
    parser.add_argument("--weights", help="file of clip_small, or random; examples/clip-small by default")
    parser.add_argument("--data-root")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    x, y, words = pictures(given.data_root)
    clip, attack, begun = frozen(words, given.weights), Inversion(given.steps, tv=given.tv), time.perf_counter()
    setting = Setting(x, y, mean_feature(feature_function(clip)), prompt_updates(clip), attack)
    rows: list[tuple[str, ...]] = [("batch", "what is seen", "PSNR, dB", "SSIM")]
    result: dict[str, Any] = {"weights": given.weights or "clip_small", "steps": given.steps, "tv": given.tv}
    for batch in sorted({1, given.batch}):
        runs = [one_seed(setting, batch, seed) for seed in range(given.seeds)]
        for name in runs[0]:
            psnr, ssim = ([run[name][k] for run in runs] for k in (0, 1))
            rows.append((str(batch), name, spread(psnr, 2), spread(ssim, 3)))
            result[f"{batch}, {name}"] = {"psnr": psnr, "ssim": ssim}
    title = f"{given.seeds} seeds, {given.steps} steps, {time.perf_counter() - begun:.0f} s"
    show(f"Reconstruction from what clients send, CIFAR-100, clip_small ({title})", rows, result, given.json)


if __name__ == "__main__":
    main()
