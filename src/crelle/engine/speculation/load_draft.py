"""Loads the model that guesses for another one."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from crelle.engine.speculation.draft_model import Draft
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import SchemeError, UnsupportedError
from crelle.formats.storage.open import open_weights
from crelle.models.loader import build
from crelle.models.nested import default

if TYPE_CHECKING:
    from crelle.engine.loaded_model import LoadedModel


def load_draft(target: "LoadedModel", given: str | Path | int) -> Draft:
    """Load a smaller model with the same vocabulary, or take a nested checkpoint at fewer bits, 2 or "2"."""
    name = str(given)
    if name.isascii() and name.isdigit() and len(name) < 3 and not Path(name).exists():
        own = target.model.build.bits or default(target.weights)
        _require_lower(int(name), target.precisions, own)
        return Draft(target.at(int(name)), f"{name} bits of the model", int(name))
    weights = open_weights(name)
    _require_same_tokens(target, Tokenizer.of(weights), weights.path)
    model = build(weights, target.model.device)
    if model.spec.encoder:
        raise UnsupportedError(f"the draft model {name} is an encoder, which predicts no tokens")
    if model.spec.vocabulary < len(target.tokenizer.vocabulary()):
        raise UnsupportedError(f"the draft model {name} has embeddings for {model.spec.vocabulary} tokens only")
    return Draft(model, weights.path.resolve().name)


def _require_same_tokens(target: "LoadedModel", tokenizer: Tokenizer, name: Path) -> None:
    if target.tokenizer.vocabulary() != tokenizer.vocabulary():
        raise UnsupportedError(
            f"the draft model {name} has another vocabulary than {target.weights.path}; both must share one"
        )


def _require_lower(bits: int, precisions: Iterable[int], own: int | None) -> None:
    offered = [p for p in precisions if own is None or p < own]
    if bits not in offered:
        have = f"here {', '.join(map(str, offered))}" if offered else "which this one does not have"
        raise SchemeError(f"a draft of {bits} bits needs a nested checkpoint with that precision below its own, {have}")
