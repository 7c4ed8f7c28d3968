"""What changes logits before a token is chosen: penalties, biases, tokens that may not come yet, grammars.

    repetition_penalty   l / penalty where l > 0, else l * penalty    tokens of prompt and answer (Keskar et al. 2019)
    frequency_penalty    l - penalty * count                          tokens of the answer, as OpenAI and vLLM count
    presence_penalty     l - penalty                                  the same tokens
    logit_bias           l + bias
    min_tokens           -inf                                         end tokens, until that many tokens are sampled

For one sequence that is a sparse update, (tokens, divisors, addends), which grows by a token a step. Those of a whole
batch are applied with one gather and one scatter; then come the masks of grammars (batch_sampler.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crelle.engine.sampling.upload import upload

if TYPE_CHECKING:
    from crelle.engine.sampling.sampler import Sampling

_FIRST = 64  # tokens that an update has room for before it grows


class Update(NamedTuple):
    """new = (l / divisors where l > 0, else l * divisors) + addends, at `tokens`."""

    tokens: np.ndarray  # int64 [T], each once
    divisors: np.ndarray  # f32 [T]
    addends: np.ndarray  # f32 [T]


class LogitsProcessor:
    """The update of one sequence."""

    def __init__(self, s: "Sampling", prompt_tokens: int = 0, end_ids: frozenset[int] = frozenset()) -> None:
        """Begin before the first token; prompt_tokens: those that frequency and presence do not count."""
        self._s, self._prompt, self._ends = s, prompt_tokens, end_ids
        self._reset()

    @staticmethod
    def needed(s: "Sampling") -> bool:
        """Whether a sampling changes logits at all."""
        plain = (s.repetition_penalty, s.frequency_penalty, s.presence_penalty, s.min_tokens) == (1.0, 0.0, 0.0, 0)
        return not plain or bool(s.logit_bias)

    def _reset(self) -> None:
        self._slots: dict[int, int] = {}  # of each token
        self._tokens, self._counts = np.zeros(_FIRST, np.int64), np.zeros(_FIRST, np.float32)
        self._seen, self._bias = np.zeros(_FIRST, bool), np.zeros(_FIRST, np.float32)
        self._read, self._last = 0, -1  # tokens counted so far, and the last of them
        for token, bias in self._s.logit_bias:
            self._bias[self._slot(token)] += bias

    def update(self, so_far: Sequence[int]) -> Update:
        """Return the update for the token after `so_far`, prompt included."""
        if len(so_far) < self._read or (self._read and so_far[self._read - 1] != self._last):
            self._reset()  # another sequence
        if self._read == 0 and self._s.repetition_penalty == 1.0:
            self._read = min(self._prompt, len(so_far))  # nothing else counts the prompt
        for i in range(self._read, len(so_far)):
            slot = self._slot(so_far[i])
            self._seen[slot] = True
            self._counts[slot] += i >= self._prompt
        self._read = len(so_far)
        self._last = so_far[-1] if so_far else -1
        if len(so_far) - self._prompt < self._s.min_tokens:
            for token in self._ends:
                self._slot(token)
        n = len(self._slots)
        counts = self._counts[:n]
        addends = self._bias[:n] - self._s.frequency_penalty * counts - self._s.presence_penalty * (counts > 0)
        if len(so_far) - self._prompt < self._s.min_tokens:
            addends[[self._slots[token] for token in self._ends]] = -np.inf
        divisors = np.where(self._seen[:n], np.float32(self._s.repetition_penalty), np.float32(1))
        return Update(self._tokens[:n], divisors, addends.astype(np.float32))

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._tokens):
            grown = (
                np.concatenate([a, np.zeros_like(a)]) for a in (self._tokens, self._counts, self._seen, self._bias)
            )
            self._tokens, self._counts, self._seen, self._bias = grown
        self._tokens[slot] = token
        return slot


def apply_updates(logits: Tensor, updates: Sequence[tuple[int, Update]]) -> None:
    """Change logits [B, V] in place by (row, update): no row has two."""
    V = logits.shape[1]
    flat = np.concatenate([row * V + u.tokens for row, u in updates])
    if not len(flat):
        return
    index = upload(flat, logits.device)
    divisors, addends = upload(
        np.stack([np.concatenate([u[part] for _, u in updates]) for part in (1, 2)]), logits.device
    )
    old = logits.view(-1)[index]
    limit = torch.finfo(logits.dtype).max  # an absurd penalty makes a logit as large as it gets, not infinite
    new = torch.where(old > 0, old / divisors, old * divisors).clamp(-limit, limit)
    logits.view(-1)[index] = torch.where(addends.isfinite(), (new + addends).clamp(-limit, limit), addends)
