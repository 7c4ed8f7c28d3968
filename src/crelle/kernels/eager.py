"""When a custom op can be skipped: its dispatch costs 10 to 30 microseconds, more than the launches behind it."""

import torch
from torch import Tensor


def is_eager(x: Tensor) -> bool:
    """Whether nothing compiles, traces, intercepts or differentiates what happens to x: the op's body may be called."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and not (x.requires_grad and torch.is_grad_enabled())
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
    )
