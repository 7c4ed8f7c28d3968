"""Embeddings of texts: a decoder's hidden states after its last norm, pooled over the tokens.

No cache is written: a text runs in one pass, and its tokens attend to each other.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from crelle.engine.loaded_model import LoadedModel
from crelle.errors import CapacityError
from crelle.kernels.reference_attention import ATTEND_ALL, AttendOptions
from crelle.models.cache import attention

MAX_TOKENS = 8192  # of a text: a pass holds all of them, and no other sequence advances meanwhile
Pooling = Literal["mean", "last"]


class _NoCache:
    """Attention within one pass."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttendOptions = ATTEND_ALL) -> Tensor:
        return attention(q, k.transpose(1, 2), v.transpose(1, 2), how)


@torch.inference_mode()
def embed(llm: LoadedModel, ids: Sequence[int], pooling: Pooling = "mean", *, normalize: bool = True) -> Tensor:
    """Return the embedding f32 [width] of a text's tokens."""
    model, most = llm.model, min(MAX_TOKENS, llm.model.spec.context)
    if not 0 < len(ids) <= most:
        raise CapacityError(f"the text has {len(ids)} tokens, but an embedding is of 1 to {most}; shorten the text")
    with llm.lock:
        tokens = torch.tensor([list(ids)], device=model.device)  # [1, T]
        x = model.hidden(tokens, torch.arange(len(ids), device=model.device), _NoCache())
        found = model.output(x[0]).float().cpu()  # [T, width]
    pooled = found.mean(0) if pooling == "mean" else found[-1]
    return torch.nn.functional.normalize(pooled, dim=0) if normalize else pooled
