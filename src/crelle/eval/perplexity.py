"""Perplexity: exp of the mean negative log-likelihood per token, over windows that do not overlap.

A window holds `context` tokens. Where the tokenizer adds a BOS, each window is BOS + context - 1 tokens of
the text, and all of those count; otherwise the first token of a window is only read and context - 1 count.
A last window that is not full is left out. Keys and values are read as the cache stores them, those of a token's own
window too: with a 4-bit cache every token sees what decoding would see.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.engine.llm import LLM
from crelle.errors import CapacityError, NumericsError, SchemeError
from crelle.formats.kv.pages import KVFormat


@dataclass(frozen=True, slots=True)
class Perplexity:
    """A perplexity and what it was measured on."""

    perplexity: float
    tokens: int  # that were evaluated: those of the text in full windows
    windows: int
    context: int
    bos: bool
    kv: str  # how the cache stored keys and values: kv16, kv8, kv4 …
    text_tokens: int  # of the whole text


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
    `progress` is called at the start and after each window with (windows done, windows in all, a note: what is
    evaluated, then the perplexity so far).
    """
    cut = Windows.of(llm, text, context=context, tokens=tokens, bos=bos)
    total, predicted = 0.0, 0
    if progress:
        progress(0, cut.count, cut.extent)
    for i, window in enumerate(cut):
        logits = window_logits(llm, window, llm.kv, 1 if stepwise else context)
        loss = F.cross_entropy(logits[0, :-1].float(), window[0, 1:], reduction="sum").item()
        total += loss
        check_finite(total, loss, i, cut.count)
        predicted += window.shape[1] - 1
        if progress:
            progress(i + 1, cut.count, f"{exp_of_loss(total / predicted):.2f}")
    return cut.result(exp_of_loss(total / predicted), llm)


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a text, token ids [1, T] each."""

    ids: list[int]
    start: list[int]  # BOS, or nothing
    body: int  # tokens of the text in a window
    device: torch.device
    text_tokens: int  # of the whole text

    @classmethod
    def of(cls, llm: LLM, text: str, *, context: int, tokens: int | None, bos: bool) -> "Windows":
        """Cut a text into windows, or say why that cannot be."""
        limit = llm.model.spec.context
        if context > limit:
            raise CapacityError(
                f"a window of {context} tokens does not fit the model's context of {limit}; lower `context`"
            )
        start = [llm.tokenizer.bos_id] if bos and llm.tokenizer.bos_id is not None else []
        body = context - len(start)
        if body < 1 or context < 2:
            raise SchemeError(f"context must be at least 2, got {context}")
        if tokens is not None and tokens < 1:
            raise SchemeError(f"tokens must be at least 1, got {tokens}")
        whole = llm.tokenizer.encode(text, bos=False)
        ids = whole[:tokens]
        count = len(ids) // body
        if count == 0:
            raise SchemeError(f"the text has {len(ids)} tokens, too few for one window of {body}; lower `context`")
        return cls(ids[: count * body], start, body, llm.model.device, len(whole))

    @property
    def count(self) -> int:
        return len(self.ids) // self.body

    @property
    def tokens(self) -> int:
        """Tokens of the text in all windows."""
        return len(self.ids)

    @property
    def extent(self) -> str:
        """What of the text is evaluated."""
        some = f"the first {self.tokens:,} of " if self.tokens < self.text_tokens else ""
        return f"over {some}{self.text_tokens:,} tokens"

    def result(self, perplexity: float, llm: LLM) -> Perplexity:
        """Return a perplexity over these windows with what it was measured on."""
        context, bos = self.body + len(self.start), bool(self.start)
        return Perplexity(perplexity, self.tokens, self.count, context, bos, str(llm.kv), self.text_tokens)

    def __iter__(self) -> Iterator[Tensor]:
        for at in range(0, len(self.ids), self.body):
            yield torch.tensor([self.start + self.ids[at : at + self.body]], device=self.device)


def check_finite(total: float, loss: float, window: int, count: int) -> None:
    """Refuse to go on with losses that are no numbers."""
    if not math.isfinite(total):
        raise not_finite(f"in window {window + 1} of {count} (a loss of {loss})")


def not_finite(where: str) -> NumericsError:
    """Return the error for logits that are NaN or infinite."""
    return NumericsError(
        f"the model's logits are not finite {where}: the "
        "checkpoint or a kernel is broken; try another kernel (`crelle explain MODEL` lists them), and "
        "quantize or download the checkpoint again if that does not help"
    )


def window_logits(llm: LLM, window: Tensor, kv: KVFormat, chunk: int) -> Tensor:
    """Return the logits [B, T, V] of windows [B, T], read in chunks through a cache of that format."""
    cache, T = llm.model.new_cache(len(window), kv=kv), window.shape[1]
    with llm.lock:
        return torch.cat([llm.model(window[:, t : t + chunk], cache) for t in range(0, T, chunk)], dim=1)


def exp_of_loss(loss: float) -> float:
    """Exponential that stays finite: a broken model has a perplexity of 1e304, not an exception."""
    return math.exp(min(700.0, loss))
