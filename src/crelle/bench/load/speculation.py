"""Decoding with tokens that are guessed, and without, in turns: the same answers, and how much sooner.

    repeats   a source file of Crelle and its first lines once more: the answer repeats the prompt, as edited code and
              quotations do
    prose     the beginning of a sentence: the answer repeats at most itself

In batch-invariant engines each pair of runs must give the same tokens, or nothing is reported; else the share of equal
answers is. Times are those of steps that decode.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any, Literal

from crelle.engine.engine import Engine
from crelle.engine.llm import LLM
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import CapacityError, UnsupportedError

Kind = Literal["repeats", "prose"]
_FILES = (
    "engine.requests.handle",
    "engine.stats",
    "formats.packing",
    "kernels.threads",
    "engine.requests.admission",
    "errors",
    "cache",
)
_BEGIN = ("The history of the", "In a small village by", "The most important thing about", "Water is", "Once upon a")
_AGAIN = 24  # tokens of a file that stand once more at the end of a prompt


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """Sequences decoded at once, with drafts and without."""

    model: str
    scheme: str
    kv: str
    speculate: str
    prompts: Kind
    clients: int
    rounds: int
    prompt_tokens: int  # of each sequence
    tokens: int  # that were decoded in all rounds
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float  # the median of the rounds
    drafted: int
    accepted: int
    steps: int
    plain_steps: int
    exact: bool = True  # both engines are batch-invariant
    equal_answers: float = 1.0  # their share


def prompts(llm: LLM, kind: Kind, count: int, tokens: int) -> list[list[int]]:
    """Return prompts of that many tokens, or shorter ones of prose."""
    if kind == "prose":
        return [llm.encode(_BEGIN[i % len(_BEGIN)] + (" " + str(i) if i >= len(_BEGIN) else "")) for i in range(count)]
    found = []
    for i in range(count):
        text = inspect.getsource(import_module(f"crelle.{_FILES[i % len(_FILES)]}"))
        ids = llm.tokenizer.encode(text)[: tokens - _AGAIN]
        found.append([*ids, *ids[1 if llm.tokenizer.bos_id is not None else 0 :][:_AGAIN]])
    return found


def measure(
    llm: LLM,
    scheme: str,
    speculate: str,
    kind: Kind,
    clients: int,
    rounds: int,
    prompt: int,
    tokens: int,
    *,
    exact: bool = True,
) -> SpeculationResult:
    """Decode with drafts and without, in turns."""
    if prompt + tokens > llm.model.spec.context or prompt <= _AGAIN:
        raise CapacityError(
            f"prompts must have more than {_AGAIN} tokens and fit the context of {llm.model.spec.context} with "
            f"{tokens} more; got {prompt}"
        )
    pages = clients * (-(-(prompt + tokens) // llm.kv.page) + 1)
    limits: dict[str, Any] = {"pages": pages, "max_batch": clients, "sharing": False, "batch_invariant": exact}
    engines = {how: Engine(llm, speculate=how, **limits) for how in (speculate, "off")}
    given = prompts(llm, kind, clients * rounds, prompt)
    for engine in engines.values():  # so that what comes first costs no more than the rest
        _run(engine, given[:1], 8)
    start = {how: engine.stats for how, engine in engines.items()}
    ratios, decoded, equal = list[float](), 0, 0
    for i in range(rounds):
        some = given[i * clients : (i + 1) * clients]
        turns = list(engines)[:: 1 if i % 2 else -1]
        runs = {how: _run(engines[how], some, tokens) for how in turns}
        equal += sum(a == b for a, b in zip(runs[speculate][0], runs["off"][0], strict=True))
        if exact and equal < (i + 1) * clients:
            raise UnsupportedError("answers with drafts differ from those without, so they are not timed")
        ratios.append(runs["off"][1] / runs[speculate][1])
        decoded += sum(map(len, runs["off"][0])) - clients
    now = {how: engine.stats for how, engine in engines.items()}
    seconds = {how: now[how].decode_seconds - start[how].decode_seconds for how in engines}
    return SpeculationResult(
        model=llm.weights.path.name,
        scheme=scheme,
        kv=str(llm.kv),
        speculate=str(engines[speculate].speculator),
        prompts=kind,
        clients=clients,
        rounds=rounds,
        prompt_tokens=max(map(len, given)),
        tokens=decoded,
        tokens_per_second=decoded / seconds[speculate],
        plain_tokens_per_second=decoded / seconds["off"],
        speedup=median(ratios),
        drafted=now[speculate].tokens_drafted - start[speculate].tokens_drafted,
        accepted=now[speculate].tokens_accepted - start[speculate].tokens_accepted,
        steps=now[speculate].steps - start[speculate].steps,
        plain_steps=now["off"].steps - start["off"].steps,
        exact=exact,
        equal_answers=equal / (rounds * clients),
    )


def _run(engine: Engine, given: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """Return the answers, and the seconds of the steps that decoded them."""
    before = engine.stats.decode_seconds
    handles = [engine.add(ids, Sampling(max_tokens=tokens), ignore_end=True) for ids in given]
    engine.run()
    if error := next((h.outputs[0].error for h in handles if h.outputs[0].error), None):
        raise error
    return [h.outputs[0].completion.tokens for h in handles], engine.stats.decode_seconds - before
