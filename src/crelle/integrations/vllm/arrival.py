"""A matrix while vLLM's loader hands over its tensors, one by one and in any order.

As soon as its last tensor is there, the matrix is assembled and cut for this rank, and the whole one is freed: a rank
never holds more than one whole matrix more than its own share of the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.base import QuantTensor, format_of, shape_of
from crelle.formats.parallel import columns
from crelle.models.nested import at_precision


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds of a matrix: some rows, and all inputs or some."""

    rows: slice
    inputs: slice

    @classmethod
    def of(cls, shape: tuple[int, int], outputs: int, inputs: int, rank: int, ranks: int) -> "Share":
        """Return the share of one of `ranks` ranks that hold [outputs, inputs] each.

        Where there are fewer distinct shares than ranks, neighbours hold the same (key and value heads).
        """
        N, K = shape
        if outputs > N or N % outputs or inputs > K or K % inputs or ranks % (N // outputs):
            raise UnsupportedError(f"a matrix of {N} x {K} cannot be shared by {ranks} ranks of {outputs} x {inputs}")
        n, k = rank // (ranks // (N // outputs)), rank if inputs < K else 0
        return cls(slice(n * outputs, (n + 1) * outputs), slice(k * inputs, (k + 1) * inputs))

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
            self.weights = [share.take(whole) for share in self.shares]
        except CrelleError as e:
            raise type(e)(f"'{self.module}': {e}") from e
        self._tensors = {}

    def require(self) -> list[QuantTensor]:
        """Return the weights, or say which tensor never came."""
        if not self.weights:
            missing = sorted(set(self.parts()) - set(self._tensors))
            raise FormatError(f"'{self.module}': the checkpoint has no tensor '{missing[0]}'")
        return self.weights


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
