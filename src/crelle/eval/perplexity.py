"""Perplexity: exp of the mean negative log-likelihood per token, over windows that do not overlap.

A window holds `context` tokens. Where the tokenizer adds a BOS, each window is BOS + context - 1 tokens of
the text, and all of those count; otherwise the first token of a window is only read and context - 1 count.
A last window that is not full is left out. Keys and values are read as the cache stores them, those of a token's own
window too: with a 4-bit cache every token sees what decoding would see.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.engine.llm import LLM
from crelle.errors import CapacityError, NumericsError, SchemeError


@dataclass(frozen=True, slots=True)
class Perplexity:
    """A perplexity and what it was measured on."""

    perplexity: float
    tokens: int  # of the text, in full windows
    windows: int
    context: int
    bos: bool
    kv: str  # how the cache stored keys and values: kv16, kv8, kv4 …


def perplexity(
    llm: LLM,
    text: str,
    *,
    context: int = 2048,
    tokens: int | None = None,
    bos: bool = True,
    stepwise: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Perplexity:
    """Measure a model on a text; `tokens` limits how much of it, `bos=False` leaves BOS out in any case.

    `stepwise` reads a window token by token, as decoding does, instead of at once, as a prompt.
    `progress` is called after each window with (windows done, of how many, the perplexity so far as text).
    """
    limit = llm.model.spec.context
    if context > limit:
        raise CapacityError(
            f"a window of {context} tokens does not fit the model's context of {limit}; lower --context"
        )
    start = [llm.tokenizer.bos_id] if bos and llm.tokenizer.bos_id is not None else []
    body = context - len(start)
    if body < 1 or context < 2:
        raise SchemeError(f"context must be at least 2, got {context}")
    if tokens is not None and tokens < 1:
        raise SchemeError(f"tokens must be at least 1, got {tokens}")
    ids = llm.tokenizer.encode(text, bos=False)[:tokens]
    count = len(ids) // body
    if count == 0:
        raise SchemeError(f"the text has {len(ids)} tokens, too few for one window of {body}; lower --context")
    total, predicted = 0.0, 0
    for i in range(count):
        window = torch.tensor([start + ids[i * body : (i + 1) * body]], device=llm.model.device)
        logits = _logits(llm, window, 1 if stepwise else context)
        loss = F.cross_entropy(logits[0, :-1].float(), window[0, 1:], reduction="sum")
        total += loss.item()
        if not math.isfinite(total):
            raise NumericsError(
                f"the model's logits are not finite in window {i + 1} of {count} (a loss of {loss.item()}): the "
                "checkpoint or a kernel is broken; try another kernel (`crelle explain MODEL` lists them), and "
                "quantize or download the checkpoint again if that does not help"
            )
        predicted += window.shape[1] - 1
        if progress:
            progress(i + 1, count, f"{_exp(total / predicted):.2f}")
    return Perplexity(_exp(total / predicted), count * body, count, context, bool(start), str(llm.kv))


def _logits(llm: LLM, window: Tensor, chunk: int) -> Tensor:
    """Return the logits [1, T, V] of a window [1, T], read in chunks."""
    cache, T = llm.model.new_cache(kv=llm.kv), window.shape[1]
    with llm.lock:
        return torch.cat([llm.model(window[:, t : t + chunk], cache) for t in range(0, T, chunk)], dim=1)


def _exp(loss: float) -> float:
    """Exponential that stays finite: a broken model has a perplexity of 1e304, not an exception."""
    return math.exp(min(700.0, loss))
