"""The precisions of a checkpoint of nested planes: which it offers, and a matrix at one of them."""

from crelle.errors import UnsupportedError
from crelle.formats.affine import NestedTensor
from crelle.formats.base import QuantTensor
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import Weights


def offered(weights: Weights) -> tuple[int, ...]:
    """Return the precisions, ascending, that all nested matrices have; () where there are no such matrices."""
    nested = _nested(weights)
    return tuple(sorted(set[int].intersection(*map(set, nested)))) if nested else ()


def default(weights: Weights) -> int | None:
    """Return the precision of a model that is built without asking for one, if it is the same in all matrices."""
    finest = {precisions[-1] for precisions in _nested(weights)}
    return finest.pop() if len(finest) == 1 else None


def _nested(weights: Weights) -> list[list[int]]:
    specs = weights.specs.values() if isinstance(weights, Checkpoint) else ()
    found = [spec.get("precisions") for spec in specs if spec["format"] == NestedTensor.format]
    return [f for f in found if isinstance(f, list) and f]  # a spec without them is refused when it is read


def require(weights: Weights, bits: int) -> None:
    """Say why a model cannot be had at a precision, if so."""
    have = offered(weights)
    if not have:
        raise UnsupportedError(
            f"{weights.path} has one precision only, so it cannot be asked for {bits} bits; "
            "the scheme bcq-nested makes checkpoints with several"
        )
    if bits not in have:
        raise UnsupportedError(f"{weights.path} serves {', '.join(map(str, have))} bits, not {bits}")


def at_precision(w: QuantTensor, bits: int | None = None) -> QuantTensor:
    """Return a nested matrix at one precision (default: the finest), any other one as it is; nothing is copied."""
    return w.at(bits or w.bits) if isinstance(w, NestedTensor) else w
