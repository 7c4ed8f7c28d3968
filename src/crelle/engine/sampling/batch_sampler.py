"""Samples the tokens of a step: one for each sequence, of which each has its own sampler.

    logits [B, V] ──▶ likeliest of each row, at once ──▶ greedy sequences
          │
          └─ rows that are processed, copied ──▶ updates: one gather, one scatter ──▶ masks ──▶ likeliest, or sampled

Log-probabilities are those of the logits as the model computed them. An exception is its row's alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from crelle.engine.requests.output import OutputState
from crelle.engine.sampling.grammar import compute_masks
from crelle.engine.sampling.logits_processors import apply_updates
from crelle.engine.sampling.sampler import likeliest

Row = tuple[OutputState, list[int]]  # a sequence, and all of its tokens so far


def sample_batch(logits: Tensor, rows: Sequence[Row]) -> list[int | BaseException]:
    """Return a token for each row of logits [B, V], or why there is none."""
    B = len(rows)
    which = [i for i, (state, _) in enumerate(rows) if state.processed]
    best: Sequence[int | None] = [None] * B
    if which or any(state.sampler.greedy for state, _ in rows):
        best = likeliest(logits)
    failed = dict[int, BaseException]()
    processed = _process(logits, rows, [i for i in which if best[i] != -1], failed)
    found = list[int | BaseException]()
    for i, (state, so_far) in enumerate(rows):
        try:
            if i in failed:
                raise failed[i]
            found.append(state.sample(lambda i=i: logits[i], so_far, best[i], processed.get(i)))  # type: ignore[misc]
        except BaseException as e:
            found.append(e)
    grammars = (state.grammar for (state, _), token in zip(rows, found, strict=True) if isinstance(token, int))
    compute_masks([g for g in grammars if g is not None and not g.finished])
    return found


def _process(
    logits: Tensor, rows: Sequence[Row], which: list[int], failed: dict[int, BaseException]
) -> dict[int, tuple[Tensor, int | None]]:
    """Return row: (its processed logits [V], the likeliest token where all of a sequence's are) for some rows."""
    updates, masks = [], dict[int, np.ndarray]()
    for i in which:
        state, so_far = rows[i]
        try:
            if state.sampler.processor is not None:
                updates.append((i, state.sampler.processor.update(so_far)))
            if state.grammar is not None:
                masks[i] = state.grammar.mask()
        except BaseException as e:
            failed[i] = e
    which = [i for i in which if i not in failed]
    if not which:
        return {}
    at = {i: row for row, i in enumerate(which)}
    chosen = logits.clone() if len(which) == len(logits) else logits[torch.tensor(which, device=logits.device)]
    if updates := [(at[i], update) for i, update in updates if i in at]:
        apply_updates(chosen, updates)
    if masks := {at[i]: mask for i, mask in masks.items() if i in at}:
        apply_masks(chosen, masks)
    cold = [i for i in which if rows[i][0].sampler.cold]
    tokens: dict[int, int] = dict(zip(which, likeliest(chosen), strict=True)) if cold else {}
    return {i: (chosen[at[i]], tokens[i] if i in cold else None) for i in which}


def apply_masks(logits: Tensor, masks: dict[int, np.ndarray]) -> None:
    """Set the logits [B, V] of tokens that a row's mask, int32 [V / 32], does not have to -inf, in place."""
    V = logits.shape[1]
    bits = torch.from_numpy(np.stack(list(masks.values()))).to(logits.device)  # [R, words]
    shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
    forbidden = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :V] == 0  # [R, at most V]
    if forbidden.shape[1] < V:  # the embedding has more rows than the tokenizer has tokens
        forbidden = torch.nn.functional.pad(forbidden, (0, V - forbidden.shape[1]), value=True)
    if list(masks) == list(range(len(logits))):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    rows = torch.tensor(list(masks), device=logits.device)
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
