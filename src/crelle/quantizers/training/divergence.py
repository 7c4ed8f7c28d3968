"""The loss of distillation: Σ_t KL(p_t ‖ p̂_t) of next-token distributions, from the logits of both models.

On a GPU one kernel each way (crelle.kernels.cuda.training.kl_divergence): softmax and divergence in torch are a dozen
passes over logits in f32, a seventh of a step for a model of 135M weights with a vocabulary of 49,152. torch is the
reference.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.kernels.cuda.training import kl_divergence as kernels


def kl_divergence(mine: Tensor, theirs: Tensor) -> Tensor:
    """Return the sum over rows of logits [M, V]; `theirs` is taken to be constant."""
    if kernels.usable(mine, theirs):
        found: Tensor = _Divergence.apply(mine, theirs)  # type: ignore[no-untyped-call]
        return found
    with torch.no_grad():
        target = theirs.float().log_softmax(-1)
    return F.kl_div(mine.float().log_softmax(-1), target, log_target=True, reduction="sum")


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, theirs: Tensor) -> Tensor:
        mine, theirs = mine.contiguous(), theirs.contiguous()
        each, log_mine, log_theirs = kernels.divergences(mine, theirs)
        ctx.save_for_backward(mine, theirs, log_mine, log_theirs)
        return each.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        mine, theirs, log_mine, log_theirs = ctx.saved_tensors
        return kernels.gradient(mine, theirs, log_mine, log_theirs, gradients[0].float().contiguous()), None
