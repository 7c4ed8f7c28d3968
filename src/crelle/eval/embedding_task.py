"""How well embeddings do a task: rank correlation of similarities with scores, or accuracy among labels."""

import torch
from torch import Tensor

from crelle.engine.embedding.embedder import Embedder
from crelle.quantize_job.task import Task


def task_score(embedder: Embedder, task: Task, labels: tuple[str, ...] = (), max_tokens: int = 128) -> float:
    """Return Spearman's correlation, or the share of texts whose own label is nearest among `labels`."""
    a = embedder.embed(task.texts, max_tokens=max_tokens)
    names = labels or task.labels
    b = embedder.embed(names or task.others, max_tokens=max_tokens)
    target = task.target(names)
    if names:
        return float(((a @ b.T).argmax(-1) == target).float().mean())
    return spearman((a * b).sum(-1), target)


def spearman(x: Tensor, y: Tensor) -> float:
    """Return the correlation of ranks."""
    return float(torch.corrcoef(torch.stack([_ranks(x), _ranks(y)]))[0, 1])


def _ranks(x: Tensor) -> Tensor:
    """Return ranks from 1, equal values sharing the mean of theirs."""
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks: Tensor = (last - (counts - 1) / 2)[inverse]
    return ranks
