"""Weights of which some are read in a thread before they are asked for."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from crelle.formats.base import QuantTensor
from crelle.formats.storage.open import Weights

_PAGE = 4096


class ReadAhead:
    """Reads matrices of another source, those that `begin` names before they are asked for."""

    def __init__(self, inner: Weights) -> None:
        self.inner, self.path, self.config = inner, inner.path, inner.config
        self.names, self.shape, self.read = inner.names, inner.shape, inner.read
        self.transposed, self.copy_tokenizer = inner.transposed, inner.copy_tokenizer
        self._pool = ThreadPoolExecutor(1, "read-ahead")
        self._begun: dict[str, Future[QuantTensor]] = {}

    def begin(self, modules: Iterable[str]) -> None:
        """Start reading matrices; those of an earlier call that were not asked for are forgotten."""
        self._begun = {module: self._pool.submit(self._matrix, module) for module in modules}

    def matrix(self, module: str) -> QuantTensor:
        """Return a matrix; an error of its reading is raised here."""
        begun = self._begun.pop(module, None)
        return self.inner.matrix(module) if begun is None else begun.result()

    def _matrix(self, module: str) -> QuantTensor:
        found = self.inner.matrix(module)
        for t in found.tensors().values():
            _touch(t)
        return found


def _touch(t: Tensor) -> None:
    """Look at every page of a tensor: what is mapped from a file is read now."""
    if t.device.type == "cpu" and t.is_contiguous() and t.numel():
        t.view(-1).view(torch.uint8)[::_PAGE].max()
