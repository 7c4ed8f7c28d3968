"""A matrix while vLLM's loader hands over its tensors, one by one and in any order.

As soon as its last tensor is there, the matrix is assembled and cut for this rank, and the whole one is freed: a rank
never holds more than one whole matrix more than its own share of the model.

Where ranks share the inputs of a matrix that cannot be split there (Atom's and act-order's groups contain inputs from
the whole matrix), each rank holds some of the rows instead. It gathers all inputs, and the all-reduce that vLLM has for
such a layer puts the outputs together, which others leave 0. Every sum is then that of one rank, and activations are
quantized as in the whole matrix.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.base import QuantTensor, format_of, shape_of
from crelle.formats.parallel import columns, why_not_split
from crelle.models.nested import at_precision


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds of a matrix: some rows, and all inputs or some."""

    rows: slice
    inputs: slice
    rank: int = 0  # of those that share the inputs
    ranks: int = 1

    @classmethod
    def of(cls, shape: tuple[int, int], outputs: int, inputs: int, rank: int, ranks: int) -> "Share":
        """Return the share of one of `ranks` ranks that hold [outputs, inputs] each.

        Where there are fewer distinct shares than ranks, neighbours hold the same (key and value heads).
        """
        N, K = shape
        if outputs > N or N % outputs or inputs > K or K % inputs or ranks % (N // outputs):
            raise UnsupportedError(f"a matrix of {N} x {K} cannot be shared by {ranks} ranks of {outputs} x {inputs}")
        n, (k, sharing) = rank // (ranks // (N // outputs)), (rank, ranks) if inputs < K else (0, 1)
        return cls(slice(n * outputs, (n + 1) * outputs), slice(k * inputs, (k + 1) * inputs), k, sharing)

    def fitting(self, w: QuantTensor) -> "Share":
        """Return this share, or rows of all inputs where a matrix cannot be split along its inputs."""
        if (reason := why_not_split(w, self.ranks)) is None:
            return self
        N, K = w.shape
        if self.ranks > N:
            raise UnsupportedError(f"{self.ranks} ranks cannot share {N} rows, nor the inputs: {reason}")
        say_once(f"inputs cannot be split over ranks ({reason}): ranks gather them, and split the rows instead")
        return Share(slice(N * self.rank // self.ranks, N * (self.rank + 1) // self.ranks), slice(0, K))

    def placed(self, y: Tensor, N: int) -> Tensor:
        """Return outputs [..., rows] among all N, the others 0."""
        return torch.nn.functional.pad(y, (self.rows.start, N - self.rows.stop))

    def take(self, w: QuantTensor) -> QuantTensor:
        """Cut a matrix; what is cut has tensors of its own, so that the whole one can be freed."""
        N, K = w.shape
        if (self.rows, self.inputs) == (slice(0, N), slice(0, K)):
            return w
        w = columns(w, self.inputs.start, self.inputs.stop)
        w = w if self.rows == slice(0, N) else w.rows(self.rows)
        return type(w).from_parts(w.spec(), {name: t.clone() for name, t in w.tensors().items()})


@dataclass(slots=True)
class Arrival:
    """One matrix: its spec, and a share for each part of the layer that it serves (several if it is fused)."""

    module: str  # by its name in the model, for messages
    spec: Mapping[str, Any]
    shares: Sequence[Share]
    bits: int | None = None  # the precision, where the matrix has several
    weights: list[QuantTensor] = field(default_factory=list)  # one for each share, once all tensors are there
    gathered: Share | None = None  # where the inputs could not be split: which rows this rank holds
    _tensors: dict[str, Tensor] = field(default_factory=dict)

    def parts(self) -> list[str]:
        """Return the names of the tensors that the matrix is stored as."""
        return format_of(self.spec).parts(self.spec)

    def put(self, part: str, tensor: Tensor) -> None:
        """Take a tensor; after the last one `weights` are there."""
        self._tensors[part] = tensor
        if set(self.parts()) - set(self._tensors):
            return
        try:
            whole = at_precision(format_of(self.spec).from_parts(self.spec, self._tensors), self.bits)
            found = [share.fitting(whole) for share in self.shares]
            self.weights = [share.take(whole) for share in found]
        except CrelleError as e:
            raise type(e)(f"'{self.module}': {e}") from e
        self.gathered = found[0] if found[0] is not self.shares[0] else None
        self._tensors = {}

    def require(self) -> list[QuantTensor]:
        """Return the weights, or say which tensor never came."""
        if not self.weights:
            missing = sorted(set(self.parts()) - set(self._tensors))
            raise FormatError(f"'{self.module}': the checkpoint has no tensor '{missing[0]}'")
        return self.weights


_said: set[str] = set()


def say_once(sentence: str) -> None:
    """Log a sentence, unless this process has."""
    if sentence not in _said:
        _said.add(sentence)
        logging.getLogger("vllm.crelle").info(sentence)


def fused_shares(shape: tuple[int, int], outputs: Sequence[int], inputs: int, rank: int, ranks: int) -> list[Share]:
    """Return the shares of a matrix that is stored as one and serves several parts, one behind the other."""
    N, K = shape
    if ranks > 1 and sum(outputs) * ranks != N:
        raise UnsupportedError(f"a fused matrix of {N} rows cannot be shared by {ranks} ranks of {sum(outputs)} rows")
    begin, found = 0, []
    for n in outputs:
        part = Share.of((n * ranks, K), n, inputs, rank, ranks)
        rows = slice(begin + part.rows.start, begin + part.rows.stop)
        found.append(Share(rows, part.inputs))
        begin += n * ranks
    return found


def arrival(
    module: str, spec: Mapping[str, Any], outputs: int, inputs: int, rank: int, ranks: int, bits: int | None
) -> Arrival:
    """Return the arrival of a matrix of which this rank holds [outputs, inputs]."""
    try:
        return Arrival(module, spec, [Share.of(shape_of(spec), outputs, inputs, rank, ranks)], bits)
    except CrelleError as e:
        raise type(e)(f"'{module}': {e}") from e
