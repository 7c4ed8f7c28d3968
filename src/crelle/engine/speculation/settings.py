"""How an engine guesses tokens: what `--speculate` and `LLM.load(speculate=...)` take.

off                    one token a step
ngram                  tokens that followed the same last tokens before, in the prompt or the answer
draft                  a smaller model guesses: `--draft DIR`, or the precision of a nested checkpoint
ngram:tokens=5         at most 5 a step
ngram:adaptive=false   always as many as allowed, whether that pays or not: for measurements
"""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from crelle.errors import SchemeError

Method = Literal["off", "ngram", "draft"]
MOST = 15  # tokens: with the one before them they fill a step of 16 rows
_SWITCH = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What guesses tokens, and how many in one step at most."""

    method: Method = "ngram"
    tokens: int = MOST
    adaptive: bool = True  # as many as pay, by measurement; else always `tokens`

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise SchemeError(f"speculation must be one of {', '.join(get_args(Method))}, got '{self.method}'")
        if not 1 <= self.tokens <= MOST:
            raise SchemeError(f"the tokens of a draft must be 1 to {MOST}, got {self.tokens}")

    @classmethod
    def parse(cls, text: "str | Speculation") -> "Speculation":
        """Read off, ngram, draft or ngram:tokens=5,adaptive=false."""
        if isinstance(text, Speculation):
            return text
        method, _, rest = text.strip().partition(":")
        tokens, adaptive = MOST, True
        for part in rest.split(",") if rest else ():
            name, _, value = part.partition("=")
            if name == "tokens" and value.isascii() and value.isdigit() and len(value) < 4:
                tokens = int(value)
            elif name == "adaptive" and value in _SWITCH:
                adaptive = _SWITCH[value]
            else:
                raise SchemeError(f"speculation should read like ngram or ngram:tokens=5,adaptive=false; got '{text}'")
        return cls(method=cast(Method, method), tokens=tokens, adaptive=adaptive)

    def require_draft(self, there: bool) -> None:
        """Refuse drafts without a model for it."""
        if self.method == "draft" and not there:
            raise SchemeError("speculation by a draft model needs one: use `draft=DIR`")

    def __str__(self) -> str:
        options = [f"tokens={self.tokens}"] * (self.tokens != MOST) + ["adaptive=false"] * (not self.adaptive)
        return f"{self.method}:{','.join(options)}" if options else self.method


def chosen_speculation(
    given: Speculation | str | None, *, batch_invariant: bool, draft: bool
) -> tuple[Speculation, str]:
    """Return how an engine guesses tokens, and why; given: what was asked for, draft: whether there is a model."""
    if given is None:
        return default_speculation(batch_invariant=batch_invariant, draft=draft)
    wanted = Speculation.parse(given)
    wanted.require_draft(draft)
    if wanted.method != "off" and not batch_invariant:
        return wanted, "as requested; without --exact, tokens may differ as they do from batch to batch"
    return wanted, "as requested"


def default_speculation(*, batch_invariant: bool, draft: bool) -> tuple[Speculation, str]:
    """Return what an engine does that was not told, and why."""
    if not batch_invariant:
        return Speculation(method="off"), (
            "verified tokens have the bits of single steps only in the batch-invariant mode (--exact)"
        )
    method: Method = "draft" if draft else "ngram"
    return Speculation(method=method), "as far as it pays by measured acceptance and step times; tokens stay the same"
