"""A model in memory, its tokenizer and its end tokens: what LLM and Engine both run.

Threads. `lock` is held by whoever runs a step of the model (and while a precision is built), since the model has
working memory of its own: the C++ step, CUDA graphs. Who calls `model(...)` directly beside others takes the lock.
"""

from functools import cached_property
from math import prod
from threading import RLock
from typing import TYPE_CHECKING

from crelle.engine.memory.experts import offload_of
from crelle.engine.sampling.grammar import GrammarCompiler
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import CapacityError, SchemeError
from crelle.formats.base import nbytes
from crelle.formats.kv.pages import KVFormat
from crelle.formats.storage.io import read_json
from crelle.formats.storage.open import Weights, scheme_of
from crelle.models.loader import Model
from crelle.models.nested import default, offered
from crelle.models.settings import token_ids
from crelle.quantizers.unquantized import is_layer

if TYPE_CHECKING:
    from crelle.engine.speculation.draft_model import Draft
    from crelle.engine.speculation.settings import Speculation

Prompt = str | list[int]  # text, or token ids that are taken as they are


class LoadedModel:
    """A model at all of its precisions, with its tokenizer."""

    def __init__(self, model: Model, tokenizer: Tokenizer, weights: Weights, kv: KVFormat | None = None) -> None:
        self.model, self.tokenizer, self.weights = model, tokenizer, weights
        self.kv = kv or KVFormat()  # how caches store keys and values
        self.end_ids = _end_ids(weights)
        self.precisions = offered(weights)  # of a nested checkpoint; () where there is only one
        self.speculation: Speculation | None = None  # how engines guess tokens that are not told; None: the default
        self.draft: Draft | None = None  # a model that may guess
        self.memory: int | None = None  # bytes that weights, working space and cache may take, where a limit was given
        self.lock = RLock()  # held by whoever runs a step of the model, at any precision
        self.grammars = GrammarCompiler(tokenizer, model.spec.vocabulary, self.end_ids)
        self._at = {model.build.bits or default(weights): model}

    @cached_property
    def bits_per_weight(self) -> float | None:
        """Stored bits per weight of the layers' quantized matrices, every scale counted; None if none is quantized."""
        found = [x.weight for x in self.model.linears() if is_layer(x.name) and x.weight.quantized]
        return 8 * sum(map(nbytes, found)) / sum(prod(w.shape) for w in found) if found else None

    def describe(self) -> str:
        """Return scheme, bits, device and context in one line."""
        bits, device = self.bits_per_weight, self.model.device
        size = "" if bits is None else f", {bits:.3g} bits per weight"
        said = f"{scheme_of(self.weights)}{size}, on {device}, context {self.model.spec.context}, cache {self.kv}"
        return said if (offload := offload_of(self.model)) is None else f"{said}, experts {offload}"

    def at(self, bits: int | None) -> Model:
        """Return the model at a precision of a nested checkpoint; None: as it was loaded.

        It is built when it is first asked for and shares with the others all but the matrices in the kernel's layout.
        """
        if bits is None:
            return self.model
        if (found := self._at.get(bits)) is None:
            with self.lock:
                if (found := self._at.get(bits)) is None:  # no other thread has built it meanwhile
                    found = self._at[bits] = self.model.at(bits)
        return found

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, or say why the model cannot continue it."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        c = self.model.spec
        if not ids:
            raise SchemeError("the prompt is empty: it needs at least one token")
        if len(ids) >= c.context:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens, but the model's context of {c.context} must also hold one "
                "new token; "
                "shorten the prompt"
            )
        if bad := [i for i in ids if not 0 <= i < c.vocabulary]:
            raise SchemeError(f"token id {bad[0]} is outside the vocabulary of {c.vocabulary}")
        return ids


def _end_ids(weights: Weights) -> frozenset[int]:
    """The end-of-sequence tokens: what config.json and generation_config.json say."""
    ids = token_ids(weights.config.get("eos_token_id"), str(weights.path))
    if (file := weights.path / "generation_config.json").is_file():
        ids |= token_ids(read_json(file).get("eos_token_id"), str(file))
    return ids
