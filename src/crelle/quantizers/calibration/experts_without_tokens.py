"""The warning about experts that no calibration token was routed to: one for a layer, and one for the whole run.

That of the run is made of those of the layers, which a run that is resumed reads from its files.
"""

import re
from collections.abc import Iterable, Sequence

_SENTENCE = "{} saw no token of the calibration text and {} quantized without calibration ({}); use more or other text"
_FOUND = re.compile(r"^(\d+) experts? saw no token of the calibration text [^(]*(?:\((.*)\))?")
_EXPERT = re.compile(r"^(.*?)\.[^.\d]*(?:\.[^.\d]*)*\.(\d+)$")  # model.layers.3, mlp.experts, 17
_NAMED = 8  # layers


def warnings_about(linears: Iterable[str]) -> list[str]:
    """Return the warning about a layer's linears without tokens, by their full names, if there are any."""
    experts = list(dict.fromkeys(name.rpartition(".")[0] for name in linears))
    if not experts:
        return []
    found = [_EXPERT.match(expert) for expert in experts]
    layers = {match[1] if match else "" for match in found}
    numbers = ", ".join(match[2] if match else expert for match, expert in zip(found, experts, strict=True))
    return [_warning(len(experts), f"{min(layers)}: {numbers}".removeprefix(": "))]


def together(warnings: Sequence[str]) -> tuple[str, ...]:
    """Return the warnings of all layers with one of these instead of one for each layer."""
    found = [match for w in warnings if (match := _FOUND.match(w))]
    others = [w for w in warnings if not _FOUND.match(w)]
    if not found:
        return tuple(others)
    named = [match[2] for match in found if match[2]]
    more = [f"and in {len(named) - _NAMED} more layers"] if len(named) > _NAMED else []
    return (*others, _warning(sum(int(match[1]) for match in found), "; ".join([*named[:_NAMED], *more])))


def _warning(count: int, which: str) -> str:
    words = ("1 expert", "was") if count == 1 else (f"{count} experts", "were")
    return _SENTENCE.format(*words, which)
