"""Log-likelihoods of endings behind prompts, many sequences in one pass through the model that generates.

    row     BOS? prompt ending[:-1] padding        logits [B, T, V]; padding stands behind, where no token sees it
    score   sum of log p(ending[i] | all before)   in f64

Prompt and ending are encoded as one text, as lm-eval does: white space at the end of a prompt goes to the ending, and
what is behind as many tokens as the prompt alone has is the ending. Endings whose rows are the same (`yes` and `no`,
one token each) share one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crelle.engine.llm import LLM
from crelle.eval.perplexity import window_logits

_LOGITS = {"cpu": 1 << 28, "cuda": 1 << 31}  # bytes of the logits of a batch


@dataclass(frozen=True, slots=True)
class Ending:
    """Token ids of prompt and ending, of which those from `start` on are the ending."""

    ids: tuple[int, ...]
    start: int

    @property
    def row(self) -> tuple[int, ...]:
        """What the model reads: the last token is only predicted."""
        return self.ids[:-1]


@dataclass(frozen=True, slots=True)
class Score:
    """What the model makes of an ending."""

    loglikelihood: float
    greedy: bool  # every token of it is the likeliest


def encode_pair(llm: LLM, prompt: str, ending: str) -> Ending:
    """Return a pair as token ids; start is 0 where nothing stands before the ending, not even BOS."""
    bare = prompt.rstrip()
    ids = llm.tokenizer.encode(prompt + ending)
    return Ending(tuple(ids), min(len(llm.tokenizer.encode(bare)), len(ids) - 1))


def loglikelihoods(llm: LLM, endings: Sequence[Ending]) -> list[Score]:
    """Return the score of each ending."""
    wanted: dict[tuple[int, ...], list[int]] = {}
    for i, ending in enumerate(endings):
        wanted.setdefault(ending.row, []).append(i)
    scores: dict[int, Score] = {}
    for rows in _batches(llm, sorted(wanted, key=len, reverse=True)):
        logits = window_logits(llm, _padded(rows, llm.model.device), llm.kv, len(rows[0]))  # [B, T, V]
        for row, of_row in zip(rows, logits, strict=True):
            for i in wanted[row]:
                scores[i] = _score(endings[i], of_row)
    return [scores[i] for i in range(len(endings))]


def _batches(llm: LLM, rows: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Split rows, longest first, so that the logits of each batch have a bounded size."""
    most = _LOGITS.get(llm.model.device.type, _LOGITS["cpu"]) // (4 * llm.model.spec.vocabulary)  # tokens
    batches: list[list[tuple[int, ...]]] = []
    for row in rows:
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]) <= most:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _padded(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Return ids [B, T] of rows of at most T; padding is any token, since no other one sees it."""
    T = len(rows[0])
    return torch.tensor([[*row, *(0,) * (T - len(row))] for row in rows], device=device)


def _score(ending: Ending, logits: Tensor) -> Score:
    """Return the score of an ending, given the logits [T, V] of its row."""
    targets = torch.tensor(ending.ids[ending.start :], device=logits.device)
    found = logits[ending.start - 1 : len(ending.row)].double().log_softmax(-1)  # [tokens of the ending, V]
    greedy = bool((found.argmax(-1) == targets).all())
    return Score(found.gather(1, targets[:, None]).sum().item(), greedy)
