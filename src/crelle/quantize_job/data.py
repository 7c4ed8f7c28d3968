"""Calibration and training data as sequences of token ids: from a text, or sampled from the model itself.

A sequence begins as a window does in `crelle eval`: with BOS where the tokenizer adds one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import FormatError, NumericsError, SchemeError
from crelle.models.cache import Cache
from crelle.models.loader import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """The text to calibrate and train on, and how much of it."""

    text: str
    rows: int | None = None  # sequences for calibration; default: by the effort, or 64
    length: int = 512  # tokens of a sequence
    own: int | None = None  # sequences that the model itself generates, besides; default: by the effort, or none
    seed: int = 0


def python_documentation() -> str:
    """Return text that every machine has: the language reference that CPython ships for `help()`."""
    try:
        from pydoc_data.topics import topics
    except ImportError as e:
        raise FormatError("this Python has no pydoc_data.topics, the default text; give a text file") from e
    return "\n\n".join(topics[name] for name in sorted(topics))


def rows_of(
    tokenizer: Tokenizer, text: str, length: int, limit: int | None = None, seed: int = 0, *, more: bool = False
) -> Tensor:
    """Split a text into sequences [S, length]; with a limit, a random sample of that many; more: others, as many."""
    start = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    body = length - len(start)
    ids = tokenizer.encode(text, bos=False)
    count = len(ids) // body
    if count == 0:
        raise SchemeError(
            f"the calibration text has {len(ids)} tokens, but one sequence needs {body}; use a longer text"
        )
    rows = torch.tensor([start + ids[i * body : (i + 1) * body] for i in range(count)])
    if limit is None or count <= limit:
        return rows[:0] if more else rows
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return rows[order[limit : 2 * limit] if more else order[:limit]]


@torch.inference_mode()
def sampled_rows(
    model: Model,
    opening: Tensor,
    length: int,
    *,
    seed: int = 0,
    batch: int = 256,
    temperature: float = 1.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> Tensor:
    """Sample sequences [S, length] from the model that continue `opening` [S, any]; reproducible for a seed.

    An id of -1 in an opening, after its first, is padding and sampled too: openings may be of different lengths.
    Progress is in tokens.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    done: list[Tensor] = []
    before = 0  # tokens of the batches that are done
    for part in torch.split(opening, batch):
        cache = model.new_cache(len(part))
        cache.grow(length - 1)  # at once: what a cache that grows leaves behind would take as much again
        given = part.to(model.device)
        row = fresh = given[:, :1]
        while row.shape[1] < length:
            fresh = next_tokens(model, cache, fresh, generator, temperature)
            if row.shape[1] < given.shape[1]:
                wanted = given[:, row.shape[1], None]
                fresh = torch.where(wanted >= 0, wanted, fresh)
            row = torch.cat([row, fresh], dim=1)
            if progress:
                progress(before + row.numel(), len(opening) * length, "sampling")
        done.append(row.cpu())
        before += row.numel()
    return torch.cat(done)


def next_tokens(
    model: Model, cache: Cache, tokens: Tensor, generator: torch.Generator | None = None, temperature: float = 1.0
) -> Tensor:
    """Append `tokens` [S, T] to the cache and sample the token that follows them, [S, 1]."""
    logits = model(tokens, cache, last=True)[:, -1].float() / temperature
    return sample(logits.softmax(-1), generator)


def sample(chances: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample an index [S, 1] from each row of probabilities [S, V].

    On a CPU by the sums of a row and one random number, which takes a tenth of torch.multinomial's time: that has a
    random number for each of V.
    """
    if chances.device.type != "cpu":
        return torch.multinomial(chances, 1, generator=generator)
    sums = chances.cumsum(-1, dtype=torch.float64)
    if not sums[:, -1].isfinite().all():
        raise NumericsError("cannot sample: the model's logits are not finite; download the model again")
    at = torch.rand(len(sums), 1, dtype=torch.float64, generator=generator) * sums[:, -1:]
    return torch.searchsorted(sums, at, right=True).clamp_(max=chances.shape[1] - 1)
