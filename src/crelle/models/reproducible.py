"""The backward pass of torch's attention with the same bits in every run.

On a GPU its fused kernels add up the gradients of queries with atomics, in whatever order thread blocks come to it, so
that a training which was killed and resumed would end in other bits than one that was not. Torch has kernels with a
fixed order, which it takes only where all of a program is to be deterministic: a setting of the process, which here is
on while that one node of a graph runs. Elsewhere it would cost time, and refuse products unless a variable is set.
"""

from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

_KERNELS = ("ScaledDotProductFlash", "ScaledDotProductEfficient")  # the others have no atomics, or no such mode
_FILL: Any = torch.utils.deterministic  # whether `empty` fills what it allocates
_STRICT = 2  # where there is no fixed order: an error, and not a warning, with which torch keeps the fast kernels


def fix_backward_order(y: Tensor) -> None:
    """Let the backward pass of attention that gave y, perhaps as a view, sum in a fixed order."""
    node = y.grad_fn
    while node is not None and not node.name().startswith(_KERNELS):
        node = node.next_functions[0][0] if "Transpose" in node.name() else None
    if node is None:
        return
    before: list[tuple[int, bool]] = []

    def enter(_: object) -> None:
        before.append((torch.get_deterministic_debug_mode(), _FILL.fill_uninitialized_memory))
        _FILL.fill_uninitialized_memory = False
        torch.set_deterministic_debug_mode(_STRICT)

    def leave(_: object, __: object) -> None:
        mode, _FILL.fill_uninitialized_memory = before.pop()
        torch.set_deterministic_debug_mode(mode)

    node.register_prehook(enter)
    node.register_hook(leave)
