"""Training an encoder on a task, through the embeddings that it is used for: there is no head to store.

    pairs     mean (cos(a, b) - score)²                       two texts and how alike they are, 0 … 1
    labels    mean cross-entropy of softmax_l 20 cos(a, l)    a text and the embeddings of the labels' names

An embedding is the mean over the tokens of a text (embedding/embedder.py). Both texts of a pair are in one batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crelle.quantizers.calibration.layer_api import half_products
from crelle.quantizers.training.blockwise import Training
from crelle.quantizers.training.end_to_end import EndToEnd, Network, picked

SHARPNESS = 20.0  # of the choice among labels


@dataclass(frozen=True, slots=True)
class TaskTokens:
    """A task in token ids, padded with 0."""

    first: Tensor  # int64 [n, T]
    lengths: Tensor  # [n]
    second: Tensor  # [n, T] the other text of each pair; [L, T] the labels
    second_lengths: Tensor
    target: Tensor  # f32 [n] scores, or int64 [n] which label

    @property
    def labels(self) -> bool:
        return not self.target.is_floating_point()

    def fingerprint(self) -> str:
        parts = (self.first, self.lengths, self.second, self.second_lengths, self.target)
        return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in parts)).hexdigest()

    @classmethod
    def of(cls, first: Sequence[list[int]], second: Sequence[list[int]], target: Tensor) -> "TaskTokens":
        T = max(len(ids) for ids in (*first, *second))
        a, b = (torch.tensor([ids + [0] * (T - len(ids)) for ids in part]) for part in (first, second))
        return cls(a, _lengths(first), b, _lengths(second), target)


def _lengths(rows: Sequence[list[int]]) -> Tensor:
    return torch.tensor([len(ids) for ids in rows])


class TaskTraining(EndToEnd):
    """Trains the coders in an encoder on a task."""

    capture = False  # batches have other lengths each

    def __init__(
        self, student: Network, coders: Sequence[nn.Module], task: TaskTokens, t: Training, device: torch.device
    ) -> None:
        super().__init__(student, coders, None, task.first, t, device)
        self.task = task

    def take(self, step: int) -> Tensor:
        task, pick = self.task, picked(step, len(self.tokens), self.t)
        other = slice(None) if task.labels else pick
        lengths = torch.cat([task.lengths[pick], task.second_lengths[other]])
        ids = torch.cat([task.first[pick], task.second[other]])[:, : int(lengths.max())]
        return self.step(step, *(t.to(self.device) for t in (task.target[pick], ids, lengths)))

    def _loss_of(self, target: Tensor, ids: Tensor, lengths: Any = None) -> Tensor:  # type: ignore[override]
        with half_products(self.device, self.t.half):
            found = embeddings(self.student, ids, lengths)
        a, b = found[: len(target)], found[len(target) :]
        if self.task.labels:
            return F.cross_entropy(SHARPNESS * a @ b.T, target)
        return ((a * b).sum(-1) - target).square().mean()


def embeddings(network: Network, ids: Tensor, lengths: Tensor) -> Tensor:
    """Return unit vectors f32 [B, width] of padded ids [B, T]."""
    network.model.attend_within(lengths)
    x = network.hidden(ids).float()
    seen = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None])[..., None]
    return F.normalize((x * seen).sum(1) / lengths[:, None], dim=-1)
