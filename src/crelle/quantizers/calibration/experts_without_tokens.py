"""The warning about experts that no calibration token was routed to: one for a layer, and one for the whole run."""

import re
from collections.abc import Iterable, Sequence

_SENTENCE = "{} saw no token of the calibration text and {} quantized without calibration; use more or other text"
_COUNT = re.compile(r"^(\d+) experts? saw no token of the calibration text ")


def warnings_about(linears: Iterable[str]) -> list[str]:
    """Return the warning about a layer's linears without tokens, by their full names, if there are any."""
    experts = {name.rpartition(".")[0] for name in linears}
    return [_warning(len(experts))] if experts else []


def together(warnings: Sequence[str]) -> tuple[str, ...]:
    """Return the warnings of all layers with one of these instead of one for each layer."""
    counts = [int(found[1]) for w in warnings if (found := _COUNT.match(w))]
    others = [w for w in warnings if not _COUNT.match(w)]
    return (*others, *([_warning(sum(counts))] if counts else []))


def _warning(count: int) -> str:
    words = ("1 expert", "was") if count == 1 else (f"{count} experts", "were")
    return _SENTENCE.format(*words)
