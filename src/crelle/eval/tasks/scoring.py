"""A model on a task: items in, accuracy with its standard error out.

accuracy        multiple choice, shared ending: the right one has the largest log-likelihood
                last word: all of its tokens are the likeliest ones;  generate: the text is an answer
accuracy_norm   multiple choice: the largest log-likelihood per character of the ending, as lm-eval's acc_norm
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from crelle.engine.llm import LLM
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import CapacityError, SchemeError
from crelle.eval.perplexity import not_finite
from crelle.eval.tasks.items import Item, read_items
from crelle.eval.tasks.journal import ItemResult, Journal, fingerprint
from crelle.eval.tasks.loglikelihood import Ending, Score, encode_pair, loglikelihoods
from crelle.eval.tasks.paired import Paired, paired, standard_error
from crelle.eval.tasks.spec import TaskSpec
from crelle.formats.storage.io import sha256

Progress = Callable[[int, int, str], None]
_ITEMS = 32  # scored together, and kept together


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The quality of a model on the items of a task."""

    accuracy: float
    stderr: float | None  # None for a single item
    accuracy_norm: float | None  # multiple choice only
    stderr_norm: float | None
    perplexity: float | None  # of the last word; other types have none
    items: int


@dataclass(frozen=True, slots=True)
class _Encoded:
    """An item in token ids."""

    item: Item
    endings: tuple[Ending, ...]  # generate: one that is only the prompt

    @property
    def longest(self) -> int:
        return max(len(ending.ids) for ending in self.endings)


def score_task(
    llm: LLM,
    spec: TaskSpec,
    *,
    limit: int | None = None,
    results: Path | None = None,
    progress: Progress | None = None,
) -> list[ItemResult]:
    """Return what a model makes of each item, in the order of the data.

    limit: only the first items.  results: a folder that keeps what was scored; a rerun scores only what is missing.
    """
    items = read_items(spec)  # all are checked before the first is scored
    if limit is not None and limit < 1:
        raise SchemeError(f"`limit` must be at least 1, got {limit}")
    wanted = items[:limit]
    encoded = {item.line: _encode(llm, spec, item) for item in wanted}
    header = {
        "settings": spec.settings,
        "data": sha256(spec.data),
        "model": fingerprint(llm.weights.path),
        "bits": llm.model.build.bits,
        "kv": str(llm.kv),
        "kernels": sorted({linear.kernel for linear in llm.model.linears()}),
        "device": llm.model.device.type,
    }
    with Journal.open(results, spec.name, header, len(items)) as journal:
        # The longest first: what does not fit the memory fails now, and items of a group are of similar length.
        missing = sorted((e for line, e in encoded.items() if line not in journal.results), key=lambda e: -e.longest)
        for at in range(0, len(missing), _ITEMS):
            journal.add(_score(llm, spec, missing[at : at + _ITEMS]))
            if progress:
                found = [r.correct for line, r in journal.results.items() if line in encoded]
                progress(len(found), len(wanted), f"{sum(found) / len(found):.1%}")
        return [journal.results[item.line] for item in wanted]


def summarize(spec: TaskSpec, results: Sequence[ItemResult]) -> TaskScore:
    """Return the figures of a task."""
    plain = [float(r.correct) for r in results]
    norm = [float(r.correct_norm) for r in results if r.correct_norm is not None]
    perplexity = None
    if spec.type == "last_word":
        perplexity = math.exp(min(700.0, -sum(r.loglikelihoods[0] for r in results) / len(results)))
    return TaskScore(
        accuracy=sum(plain) / len(plain),
        stderr=standard_error(plain),
        accuracy_norm=sum(norm) / len(norm) if norm else None,
        stderr_norm=standard_error(norm) if norm else None,
        perplexity=perplexity,
        items=len(results),
    )


def compare(model: Sequence[ItemResult], other: Sequence[ItemResult]) -> tuple[Paired, Paired | None]:
    """Compare two models' results on the same items: accuracy, and accuracy_norm where there is one."""
    plain = paired([r.correct for r in model], [r.correct for r in other])
    if any(r.correct_norm is None for r in (*model, *other)):
        return plain, None
    return plain, paired([bool(r.correct_norm) for r in model], [bool(r.correct_norm) for r in other])


def _encode(llm: LLM, spec: TaskSpec, item: Item) -> _Encoded:
    """Return an item in token ids, or say why the model cannot read it."""
    context, where = llm.model.spec.context, f"{spec.data}, line {item.line}"
    if spec.type == "generate":
        ids = tuple(llm.tokenizer.encode(item.pairs[0][0]))
        endings: tuple[Ending, ...] = (Ending(ids, len(ids)),)
        needed, what = len(ids) + spec.max_tokens, f"a prompt of {len(ids)} tokens with {spec.max_tokens} to generate"
    else:
        endings = tuple(encode_pair(llm, *pair) for pair in item.pairs)
        needed = max(len(ending.row) for ending in endings)
        what = f"a prompt with its ending of {needed} tokens"
    if any(ending.start < 1 for ending in endings):
        raise SchemeError(f"{where}: the prompt is empty, and this model's tokenizer adds no BOS; give it a prompt")
    if needed > context:
        raise CapacityError(
            f"{where}: {what} does not fit the model's context of {context}; leave this line out of the data, or "
            "take a model with a longer context"
        )
    return _Encoded(item, endings)


def _score(llm: LLM, spec: TaskSpec, group: Sequence[_Encoded]) -> list[ItemResult]:
    if spec.type == "generate":
        sampling = Sampling(max_tokens=spec.max_tokens, stop=spec.stop)
        said = llm.generate([list(e.endings[0].ids) for e in group], sampling)
        return [
            ItemResult(e.item.line, s.text.strip() in e.item.answers, text=s.text)
            for e, s in zip(group, said, strict=True)
        ]
    scores = iter(loglikelihoods(llm, [ending for e in group for ending in e.endings]))
    return [_judge(spec, e.item, [next(scores) for _ in e.endings]) for e in group]


def _judge(spec: TaskSpec, item: Item, scores: Sequence[Score]) -> ItemResult:
    found = [score.loglikelihood for score in scores]
    if not all(map(math.isfinite, found)):
        raise not_finite(f"for line {item.line} of {spec.data}")
    if spec.type == "last_word":
        return ItemResult(item.line, scores[0].greedy, loglikelihoods=tuple(found))
    best = found.index(max(found)) == item.right
    norm = None
    if spec.type == "multiple_choice":
        each = [score / length for score, length in zip(found, item.lengths, strict=True)]
        norm = each.index(max(each)) == item.right
    return ItemResult(item.line, best, norm, tuple(found))
