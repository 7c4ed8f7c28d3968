"""Samples the tokens of a step: one for each sequence, of which each has its own sampler.

    logits [B, V] ─┬─────────────────────────────────────────────────────────────────▶ likeliest of each row, greedy
                   └─ rows that are processed, copied ─▶ updates: one gather, one scatter ─▶ masks ─▶ likeliest, greedy
                                                                     rows of both that are not greedy ─▶ random_tokens

All that is computed for the whole batch and fetched at once: on a GPU one wait a step. Log-probabilities are those of
the logits as the model computed them. An exception is its row's alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from crelle.engine.requests.output import OutputState, nothing_allowed
from crelle.engine.sampling.grammar import compute_masks
from crelle.engine.sampling.logits_processors import apply_updates
from crelle.engine.sampling.random_tokens import random_tokens
from crelle.engine.sampling.sampler import likeliest
from crelle.engine.sampling.upload import upload

Row = tuple[OutputState, list[int]]  # a sequence, and all of its tokens so far
_NONE_ALLOWED = -2


def sample_batch(logits: Tensor, rows: Sequence[Row]) -> list[int | BaseException]:
    """Return a token for each row of logits [B, V], or why there is none."""
    failed = dict[int, BaseException]()
    chosen, which = _process(logits, rows, failed)
    tokens = _tokens(logits, rows, chosen, which)
    found = list[int | BaseException]()
    for i, (state, so_far) in enumerate(rows):
        try:
            if i in failed:
                raise failed[i]
            if tokens[i] == _NONE_ALLOWED:
                raise nothing_allowed(len(so_far))
            found.append(state.take(tokens[i], lambda i=i: logits[i], len(so_far)))  # type: ignore[misc]
        except BaseException as e:
            found.append(e)
    grammars = (state.grammar for (state, _), token in zip(rows, found, strict=True) if isinstance(token, int))
    compute_masks([g for g in grammars if g is not None and not g.finished], start=not logits.is_cuda)
    return found


def _process(logits: Tensor, rows: Sequence[Row], failed: dict[int, BaseException]) -> tuple[Tensor, list[int]]:
    """Return processed logits [P, V] and the rows that they are of; `failed` gets those that cannot be processed."""
    updates, masks, which = [], dict[int, np.ndarray](), list[int]()
    reached = _Reached(logits)
    for i, (state, so_far) in enumerate(rows):
        if not state.processed:
            continue
        try:
            if state.sampler.processor is not None:
                updates.append((i, state.sampler.processor.update(so_far)))
            if state.grammar is not None:
                masks[i] = state.grammar.mask(reached)
            which.append(i)
        except BaseException as e:
            failed[i] = e
    if not which:
        return logits[:0], which
    at = {i: row for row, i in enumerate(which)}
    chosen = logits.clone() if len(which) == len(logits) else logits[upload(which, logits.device)]
    if updates := [(at[i], update) for i, update in updates if i in at]:
        apply_updates(chosen, updates)
    if masks := {at[i]: mask for i, mask in masks.items() if i in at}:
        apply_masks(chosen, masks)
    return chosen, which


def _tokens(logits: Tensor, rows: Sequence[Row], chosen: Tensor, which: list[int]) -> list[int]:
    """Return a token for each row: -1 where the model's logits are not finite, -2 where processing left no token."""
    order, parts = list[int](), list[Tensor]()
    if any(state.sampler.greedy and state.grammar is None for state, _ in rows):
        greedy = [i for i, (state, _) in enumerate(rows) if state.sampler.greedy and state.grammar is None]
        order, parts = greedy, [_take(likeliest(logits), greedy)]
    processed = set(which)
    cold = [row for row, i in enumerate(which) if rows[i][0].sampler.cold]
    warm = [row for row, i in enumerate(which) if not rows[i][0].sampler.cold]
    plain = [i for i, (state, _) in enumerate(rows) if not state.processed and not state.sampler.cold]
    if cold:
        order += [which[row] for row in cold]
        parts.append(likeliest(_take(chosen, cold)))
    if warm or plain:
        own = [which[row] for row in warm] + plain
        sources = [_take(x, some) for x, some in ((chosen, warm), (logits, plain)) if some]
        order += own
        parts.append(
            random_tokens(torch.cat(sources) if len(sources) > 1 else sources[0], [rows[i][0].sampler for i in own])
        )
    if not parts:
        return [-1] * len(rows)
    found = torch.cat(parts)
    if which:  # an update may make a finite number of an infinite one, and processing may forbid all
        finite = _take(logits.amax(-1).isfinite(), order)
        changed = upload([i in processed for i in order], logits.device)
        found = torch.where(finite, torch.where((found < 0) & changed, _NONE_ALLOWED, found), -1)
    tokens = dict(zip(order, found.tolist(), strict=True))
    return [tokens.get(i, -1) for i in range(len(rows))]


def _take(x: Tensor, rows: list[int]) -> Tensor:
    """Return some rows of x; x itself where that is all."""
    return x if rows == list(range(len(x))) else x[upload(rows, x.device)]


class _Reached:
    """Whether the logits of a step are there, on a GPU that may still compute them."""

    def __init__(self, logits: Tensor) -> None:
        self._event = torch.cuda.Event() if logits.is_cuda else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    def __call__(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]


def apply_masks(logits: Tensor, masks: dict[int, np.ndarray]) -> None:
    """Set the logits [B, V] of tokens that a row's mask, int32 [V / 32], does not have to -inf, in place."""
    V = logits.shape[1]
    words = np.stack(list(masks.values()))  # [R, words]
    if logits.is_cuda:
        shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
        allowed = ((upload(words, logits.device)[:, :, None] >> shifts) & 1).flatten(1)[:, :V]
    else:
        allowed = torch.from_numpy(np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :V])
    forbidden = allowed == 0  # [R, at most V]
    if forbidden.shape[1] < V:  # the embedding has more rows than the tokenizer has tokens
        forbidden = torch.nn.functional.pad(forbidden, (0, V - forbidden.shape[1]), value=True)
    if list(masks) == list(range(len(logits))):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    rows = upload(list(masks), logits.device)
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
