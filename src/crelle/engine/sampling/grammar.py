"""Answers that must match a JSON schema, a regular expression or a grammar, by llguidance.

    spec      what was asked for: a kind and a text
    compiled  once for all sequences that ask for the same: GrammarCompiler.compile, in any thread
    state     of one sequence: accept(token) goes on, mask() has a bit for each token that may come next

The masks of a batch are computed in one call, in threads of llguidance's and without the interpreter lock, while the
model runs the next step. On a CPU a thread makes that call as soon as the tokens before are known, since ours is busy
with the model; on a GPU ours does, when it has launched the step and would only wait. What a grammar may cost is
limited: its size, the time to build it and the work for each token; beyond that the request is refused, or ends with
an error.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from json import dumps
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import CapacityError, SchemeError, UnsupportedError
from crelle.kernels.threads import available_cores

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_TEXT = 64 << 10  # characters of a schema, expression or grammar
_KEPT = 64  # compiled grammars
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # some 20 ms
    "step_lexer_fuel": 200_000,  # for one token, some 15 ms
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "max_grammar_size": 100_000,
}
SPACE = r"(\n[ \t]{0,24}| )?"  # between JSON tokens: without a bound, a small model may write nothing else
_SAYS = 300  # characters of the library's messages
Kind = Literal["json_schema", "regex", "choice", "grammar", "lark"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must match. json_schema, choice: JSON; grammar: GBNF or Lark; lark: as llguidance extends it."""

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT:
            raise SchemeError(f"the {self.name} has {len(self.text)} characters; at most {MAX_TEXT} are allowed")

    @property
    def name(self) -> str:
        return {"json_schema": "JSON schema", "regex": "regular expression", "choice": "list of choices"}.get(
            self.kind, "grammar"
        )


class GrammarCompiler:
    """Compiles grammars for the tokens of one model."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_ids: frozenset[int]) -> None:
        self._of = tokenizer, vocabulary, end_ids
        self._tokens: LLTokenizer | None = None
        self._known: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._lock = Lock()

    def compile(self, spec: GrammarSpec) -> "CompiledGrammar":
        """Return a grammar, or say what is wrong with it."""
        with self._lock:
            if (found := self._known.get(spec)) is not None:
                self._known.move_to_end(spec)
                return found
            if self._tokens is None:
                self._tokens = _tokens(*self._of)
        made = CompiledGrammar(spec, self._tokens)
        with self._lock:
            self._known[spec] = made
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return made


def _tokens(tokenizer: Tokenizer, vocabulary: int, end_ids: frozenset[int]) -> "LLTokenizer":
    try:
        from llguidance import LLTokenizer
    except ImportError as e:
        raise UnsupportedError(
            f"structured answers need the package llguidance ({e}); pip install 'crelle[server]'"
        ) from e
    ends = sorted(end_ids) or [i for i in (tokenizer.special_id("eos_token"),) if i is not None] or [0]
    try:
        return LLTokenizer(tokenizer.backend, n_vocab=vocabulary, eos_token=ends)
    except ValueError as e:
        raise UnsupportedError(f"structured answers cannot use this model's tokenizer: {str(e)[:_SAYS]}") from e


class CompiledGrammar:
    """A grammar at its beginning."""

    def __init__(self, spec: GrammarSpec, tokens: "LLTokenizer") -> None:
        from llguidance import LLMatcher, LLParserLimits

        self.spec = spec
        limits = LLParserLimits(**_LIMITS, verbose_errors=False)
        try:
            self._matcher = LLMatcher(tokens, _source(spec), limits=limits, log_level=0)
        except (ValueError, RecursionError) as e:
            raise SchemeError(f"the {spec.name} is invalid: {str(e)[:_SAYS]}") from e
        if self._matcher.is_error():
            raise SchemeError(f"the {spec.name} is invalid: {_first_line(self._matcher.get_error())}")
        self._mask = _compute(self._matcher, tokens.vocab_size, spec)
        if not self._mask.any():
            raise SchemeError(f"the {spec.name} allows no answer at all")

    def start(self) -> "GrammarState":
        """Return the state of a new sequence."""
        return GrammarState(self.spec, self._matcher.deep_copy(), self._mask)


class GrammarState:
    """Where an answer stands in its grammar."""

    def __init__(self, spec: GrammarSpec, matcher: "LLMatcher", mask: np.ndarray) -> None:
        self.matcher, self.words = matcher, mask.size
        self._spec = spec
        self._mask: np.ndarray | None = mask
        self._batch: tuple[MaskBatch, int] | None = None  # where the next mask is
        self.finished = False  # nothing can follow but the end
        self.waited = 0  # masks that were not there when the logits were

    def accept(self, token: int) -> None:
        """Advance by a token that was sampled."""
        if self.finished or not self.matcher.consume_token(token):
            _require(self.matcher, self._spec)
            raise AssertionError(f"token {token} was not allowed")
        self.finished = self.matcher.is_stopped()

    def mask(self, reached: Callable[[], bool] = lambda: True) -> np.ndarray:
        """Return a bit for each token that may come next, int32 [V / 32]; reached: whether the logits are there."""
        if self._mask is None:
            assert self._batch is not None, "compute_masks comes first"
            batch, row = self._batch
            self._mask = batch.masks(reached)[row]
            self.waited += batch.late
            _require(self.matcher, self._spec)
        return self._mask

    def expect(self, batch: "MaskBatch", row: int) -> None:
        """Take where the next mask will be."""
        self._mask, self._batch = None, (batch, row)


class MaskBatch:
    """The next masks of some sequences."""

    _thread = ThreadPoolExecutor(1, "crelle-masks")
    _executor: "LLExecutor | None" = None

    def __init__(self, states: Sequence[GrammarState], *, start: bool) -> None:
        """Take what to compute masks of; start: begin now, in a thread."""
        self._of, self._words = [(state.matcher, row) for row, state in enumerate(states)], states[0].words
        self._masks: np.ndarray | None = None
        self._started = self._thread.submit(self._compute) if start else None
        self.late = False
        for row, state in enumerate(states):
            state.expect(self, row)

    def masks(self, reached: Callable[[], bool]) -> np.ndarray:
        """Return them, int32 [states, V / 32]."""
        if self._masks is None:
            waits = self._started is None or not self._started.done()
            self._masks = self._compute() if self._started is None else self._started.result()
            self.late = waits and reached()
        return self._masks

    def _compute(self) -> np.ndarray:
        from llguidance import LLExecutor

        if MaskBatch._executor is None:
            MaskBatch._executor = LLExecutor(max(1, available_cores() - 1))
        found = np.zeros((len(self._of), self._words), dtype=np.int32)
        MaskBatch._executor.unsafe_compute_mask_ptr(self._of, found.ctypes.data, 4 * self._words, len(self._of))
        return found


def compute_masks(states: Sequence[GrammarState], *, start: bool) -> None:
    """Have the next mask of each computed: from now on, or together when the first is asked for."""
    for words in {state.words for state in states}:
        MaskBatch([state for state in states if state.words == words], start=start)


def _compute(matcher: "LLMatcher", vocabulary: int, spec: GrammarSpec) -> np.ndarray:
    mask = np.zeros(-(-vocabulary // 32), dtype=np.int32)
    if not matcher.is_stopped():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    _require(matcher, spec)
    return mask


def _require(matcher: "LLMatcher", spec: GrammarSpec) -> None:
    if matcher.is_error():
        raise CapacityError(f"the {spec.name} takes too much work: {_first_line(matcher.get_error())}; simplify it")


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:_SAYS]


def _source(spec: GrammarSpec) -> Any:
    from llguidance import LLMatcher, grammar_from

    if spec.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(spec.text, overrides={"whitespace_pattern": SPACE})
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(spec.text)
    return grammar_from("choice" if spec.kind == "choice" else "grammar", spec.text)


def one_of(choices: Sequence[str]) -> GrammarSpec:
    """Return a grammar of some answers."""
    return GrammarSpec("choice", dumps(list(choices)))
