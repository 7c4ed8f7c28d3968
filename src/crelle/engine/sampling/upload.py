"""Small arrays for the device, without a wait.

A plain copy from memory of the host to a GPU waits until all that was started before it has ended, here the model's
step. From pinned memory it is queued behind the step, and so is what uses it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(values: Tensor | np.ndarray | Sequence[int] | Sequence[bool], device: torch.device) -> Tensor:
    """Return values of the host as a tensor of a device."""
    made = values if isinstance(values, Tensor) else torch.as_tensor(values)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
