"""One token, sampled as the engine does for a batch of one."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from crelle.engine.requests.output import OutputState
from crelle.engine.sampling.batch_sampler import sample_batch
from crelle.engine.sampling.sampler import Sampler


def sample(sampler: Sampler, logits: Tensor, so_far: Sequence[int]) -> int:
    """Return the token after some for logits [V]; raise why there is none."""
    text: Any = None
    (found,) = sample_batch(logits[None], [(OutputState(0, len(so_far), sampler, text, None), list(so_far))])
    if isinstance(found, BaseException):
        raise found
    return found
