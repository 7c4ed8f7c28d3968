"""Embeddings of texts by an encoder.

>>> embedder = Embedder.load("out/minilm-3bit")                          # doctest: +SKIP
>>> a, b = embedder.embed(["A cat sleeps.", "A kitten is napping."])     # doctest: +SKIP
>>> float(a @ b)                                                         # doctest: +SKIP
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import SchemeError
from crelle.formats.base import nbytes
from crelle.formats.storage.open import open_weights
from crelle.formats.storage.task_scales import with_scales
from crelle.models.encoder import EncoderModel
from crelle.models.loader import build_encoder, choose_device
from crelle.quantizers.unquantized import is_layer

Pooling = Literal["mean", "cls"]


class Embedder:
    """An encoder and its tokenizer."""

    def __init__(self, model: EncoderModel, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        scales: str | Path | None = None,
        device: str = "auto",
        kernel: str | None = None,
        bits: int | None = None,
    ) -> Self:
        """Open a checkpoint of ours or a Hugging Face directory.

        `scales`: those of a task, from `crelle tune --scales`. `bits`: the precision of a nested checkpoint.
        """
        weights = open_weights(path)
        weights = weights if scales is None else with_scales(weights, scales)
        model = build_encoder(weights, choose_device(device), kernel=kernel, bits=bits)
        return cls(model, Tokenizer.of(weights))

    @property
    def width(self) -> int:
        """Dimensions of an embedding."""
        return self.model.spec.width

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per weight of the layers' quantized matrices; None if none is quantized."""
        found = [x.weight for x in self.model.linears() if is_layer(x.name) and x.weight.quantized]
        return 8 * sum(map(nbytes, found)) / sum(prod(w.shape) for w in found) if found else None

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a text as the model reads it; what does not fit `max_tokens` or the context is cut off."""
        return self.tokenizer.encode_whole(text, min(max_tokens or self.model.spec.context, self.model.spec.context))

    def embed(
        self,
        texts: Sequence[str],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        batch: int = 32,
        max_tokens: int | None = None,
    ) -> Tensor:
        """Return f32 [len(texts), width]: the mean over a text's tokens, or its first one (`cls`).

        normalize: to unit length, so that a dot product is the cosine similarity. Texts are batched by length.
        """
        if isinstance(texts, str):
            raise SchemeError("`texts` should be a list of texts, not one text")
        if pooling not in ("mean", "cls"):
            raise SchemeError(f"the pooling must be 'mean' or 'cls', got '{pooling}'")
        if batch < 1 or (max_tokens is not None and max_tokens < 3):
            raise SchemeError(f"a batch has at least 1 text and a text 3 tokens, got {batch} and {max_tokens}")
        ids = [self.encode(text, max_tokens) for text in texts]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        found = torch.empty(len(ids), self.width)
        for begin in range(0, len(order), batch):
            rows = order[begin : begin + batch]
            found[rows] = self._pooled([ids[i] for i in rows], pooling).float().cpu()
        return torch.nn.functional.normalize(found, dim=-1) if normalize else found

    def _pooled(self, rows: list[list[int]], pooling: Pooling) -> Tensor:
        lengths = torch.tensor([len(row) for row in rows])
        T = int(lengths.max())
        ids = torch.tensor([row + [0] * (T - len(row)) for row in rows])
        x: Tensor = self.model(ids.to(self.model.device), None if bool((lengths == T).all()) else lengths).float()
        if pooling == "cls":
            return x[:, 0]
        seen = (torch.arange(T) < lengths[:, None]).to(x.device)[..., None]  # [B, T, 1]
        return (x * seen).sum(1) / seen.sum(1)
