"""Decoding with tokens that are guessed, and without, in turns: the same answers, and how much sooner.

    summary   a text of Crelle's, and its first words as the beginning of what it says: the answer quotes it
    edit      a source file of Crelle, and its first lines with another word in them: the answer repeats the file
    prose     the beginning of a sentence: the answer repeats at most itself
    random    random tokens, for models of random weights

No model has to be able to summarise or to edit for that: what is measured is the speed of answers that repeat their
prompts, as such answers do. In batch-invariant engines each pair of runs must give the same tokens, or nothing is
reported; else the share of equal answers is. The first round of each engine, in which graphs are captured and
acceptance is learnt, is not counted. Times are those of steps that decode, from the end of one to the end of the next.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any, Literal

from crelle.bench.load.simulated_acceptance import simulate_acceptance
from crelle.bench.load.trace import Prompts
from crelle.engine.compile_ahead import compile_kernels
from crelle.engine.engine import Engine
from crelle.engine.llm import LLM
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import CapacityError, UnsupportedError

Kind = Literal["summary", "edit", "prose", "random"]
_FILES = (
    "engine.requests.handle",
    "engine.stats",
    "formats.packing",
    "kernels.threads",
    "engine.requests.admission",
    "errors",
    "cache",
)
_TEXTS = (
    "engine.scheduler",
    "engine.engine",
    "engine.block_manager",
    "engine.requests.sequence",
    "kernels.cuda.executor",
    "engine.speculation.pace",
    "engine.speculation.ngram",
)
_BEGIN = ("The history of the", "In a small village by", "The most important thing about", "Water is", "Once upon a")
_AGAIN = 24  # tokens of a file or a text that stand once more at the end of a prompt
_ASKED = {
    "summary": "\n\nIn its own words, the text says:\n\n",
    "edit": "\n\n# The same file, with another first line:\n\n",
}


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """Sequences decoded at once, with drafts and without."""

    model: str
    scheme: str
    kv: str
    speculate: str
    prompts: Kind
    clients: int
    rounds: int  # that count
    prompt_tokens: int  # of each sequence
    tokens: int  # that were decoded in all rounds
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float  # the median of the rounds
    slowest_round: float  # the speedup of the worst one
    drafted: int
    accepted: int
    steps: int
    plain_steps: int
    exact: bool = True  # both engines are batch-invariant
    equal_answers: float | None = 1.0  # their share; None: acceptance is simulated, so that answers mean nothing
    simulated_acceptance: float | None = None  # guesses count as right with this probability, whatever they are


def prompts(llm: LLM, kind: Kind, count: int, tokens: int) -> list[list[int]]:
    """Return prompts of that many tokens, or shorter ones of prose."""
    if kind == "random":
        random = Prompts(llm.model.spec.vocabulary)
        return [random.next(tokens) for _ in range(count)]
    if kind == "prose":
        return [llm.encode(_BEGIN[i % len(_BEGIN)] + (" " + str(i) if i >= len(_BEGIN) else "")) for i in range(count)]
    return [_repeating(llm, kind, i, tokens) for i in range(count)]


def _repeating(llm: LLM, kind: Literal["summary", "edit"], i: int, tokens: int) -> list[int]:
    """Return the i-th prompt whose answer repeats it."""
    names = _TEXTS if kind == "summary" else _FILES
    module = import_module(f"crelle.{names[i % len(names)]}")
    text = (inspect.getdoc(module) or "") if kind == "summary" else inspect.getsource(module)
    asked = llm.tokenizer.encode(_ASKED[kind], bos=False)
    ids = llm.tokenizer.encode(text)[: tokens - _AGAIN - len(asked)]
    again = llm.tokenizer.encode(text, bos=False)[:_AGAIN]
    if kind == "edit":  # the first line's last word is another one
        first, _, rest = llm.tokenizer.decode(again).partition("\n")
        again = llm.tokenizer.encode(" ".join([*first.split(" ")[:-1], "jobs"]) + "\n" + rest, bos=False)[:_AGAIN]
    return [*ids, *asked, *again]


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
    acceptance: float | None = None,
) -> SpeculationResult:
    """Decode with drafts and without, in turns.

    acceptance: drafts are made and verified at their real cost, and each guess counts as right with that probability.
    """
    longest = len(_ASKED["summary"]) + 2 * _AGAIN
    if prompt + tokens > llm.model.spec.context or prompt <= longest:
        raise CapacityError(
            f"prompts must have more than {longest} tokens and fit the context of {llm.model.spec.context} with "
            f"{tokens} more; got {prompt}"
        )
    pages = clients * (-(-(prompt + tokens) // llm.kv.page) + 1)
    limits: dict[str, Any] = {"pages": pages, "max_batch": clients, "sharing": False, "batch_invariant": exact}
    engines = {how: Engine(llm, speculate=how, **limits) for how in (speculate, "off")}
    if acceptance is not None:
        simulate_acceptance(engines[speculate], acceptance)
    given = prompts(llm, kind, clients * (rounds + 1), prompt)
    sizes = {len(ids) for ids in given} | {sum(map(len, given[:clients])), engines["off"].plan.budget}
    for engine in engines.values():
        compile_kernels(engine, range(1, clients + 1), {min(n, engine.plan.budget) for n in sizes})
        _run(engine, given[:clients], tokens)
    start = {how: engine.stats for how, engine in engines.items()}
    ratios, decoded, equal = list[float](), 0, 0
    for i in range(rounds):
        some = given[(i + 1) * clients : (i + 2) * clients]
        turns = list(engines)[:: 1 if i % 2 else -1]
        runs = {how: _run(engines[how], some, tokens) for how in turns}
        equal += sum(a == b for a, b in zip(runs[speculate][0], runs["off"][0], strict=True))
        if exact and acceptance is None and equal < (i + 1) * clients:
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
        slowest_round=min(ratios),
        drafted=now[speculate].tokens_drafted - start[speculate].tokens_drafted,
        accepted=now[speculate].tokens_accepted - start[speculate].tokens_accepted,
        steps=now[speculate].steps - start[speculate].steps,
        plain_steps=now["off"].steps - start["off"].steps,
        exact=exact,
        equal_answers=equal / (rounds * clients) if acceptance is None else None,
        simulated_acceptance=acceptance,
    )


def _run(engine: Engine, given: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """Return the answers, and the seconds of the steps that decoded them."""
    before = engine.stats.decode_seconds
    handles = [engine.add(ids, Sampling(max_tokens=tokens), ignore_end=True) for ids in given]
    engine.run()
    if error := next((h.outputs[0].error for h in handles if h.outputs[0].error), None):
        raise error
    return [h.outputs[0].completion.tokens for h in handles], engine.stats.decode_seconds - before
