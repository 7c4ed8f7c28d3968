"""The requests of another evaluation harness, lm-eval's in particular, as token ids and sampling options.

Our own tasks refuse an item that does not fit the context. A harness expects its model to drop the beginning of a long
prompt, so `fitted` does, and the caller can tell how often.
"""

from collections.abc import Mapping
from typing import Any

import torch

from crelle.engine.llm import LLM
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import CapacityError, SchemeError
from crelle.eval.tasks.loglikelihood import Ending, encode_pair

_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one given counts
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def prefix_id(llm: LLM) -> int:
    """Return the token that stands before a text which has no context: BOS, or else the end of a sequence."""
    found = [llm.tokenizer.bos_id, llm.tokenizer.special_id("bos_token"), llm.tokenizer.special_id("eos_token")]
    if (first := next((i for i in (*found, *sorted(llm.end_ids)) if i is not None), None)) is None:
        raise SchemeError(f"{llm.weights.path} has neither a BOS nor an end token to put before a text without context")
    return first


def encode_request(llm: LLM, context: str, continuation: str) -> Ending:
    """Return a pair as token ids; a context that begins with BOS, as chat templates write it, has it once."""
    if not continuation:
        raise SchemeError("the continuation to score is empty")
    pair, bos = encode_pair(llm, context, continuation), llm.tokenizer.bos_id
    if bos is not None and pair.ids[:2] == (bos, bos):
        pair = Ending(pair.ids[1:], pair.start - 1)
    if pair.start >= 1:
        return pair
    prefix = prefix_id(llm)
    if pair.ids[0] == prefix and len(pair.ids) > 1:
        return Ending(pair.ids, 1)
    return Ending((prefix, *pair.ids), 1)


def fitted(pair: Ending, limit: int) -> Ending:
    """Return a pair whose row has at most `limit` tokens, by leaving out the first ones of its prompt."""
    over = len(pair.row) - limit
    if over <= 0:
        return pair
    if over >= pair.start:
        tokens = len(pair.ids) - pair.start
        raise CapacityError(f"a continuation of {tokens} tokens does not fit the model's context of {limit}")
    return Ending(pair.ids[over:], pair.start - over)


def rolling_windows(llm: LLM, text: str, limit: int) -> list[Ending]:
    """Return windows in which each token of a text is predicted once, the first from the prefix token.

    Rows have at most `limit` tokens; the last one is full too where the text has several, and predicts what is left.
    """
    ids = (prefix_id(llm), *llm.tokenizer.encode(text, bos=False))
    windows = []
    for start in range(1, len(ids), limit):
        end = min(start + limit, len(ids))
        begin = max(0, end - 1 - limit)
        windows.append(Ending(ids[begin:end], start - begin))
    return windows


def encode_prompt(llm: LLM, text: str, max_tokens: int, limit: int) -> tuple[list[int], bool]:
    """Return the end of a prompt that leaves room for `max_tokens`, and whether that is less than the prompt."""
    room = limit - max_tokens
    if room < 1:
        raise CapacityError(
            f"{max_tokens} tokens to generate leave no room for a prompt in the model's context of {limit}; lower "
            "max_gen_toks"
        )
    ids, bos = llm.tokenizer.encode(text), llm.tokenizer.bos_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return (ids or [prefix_id(llm)])[-room:], len(ids) > room


def sampling_of(options: Mapping[str, Any], max_tokens: int) -> Sampling:
    """Return lm-eval's generation options as ours; `max_tokens` where they name none.

    Greedy unless `do_sample` or a temperature says otherwise. Seeds come from torch's generator, which lm-eval seeds.
    """
    if unknown := sorted(set(options) - {"until", "do_sample", *_MAX_TOKENS, *_OPTIONS}):
        known = ", ".join(("until", "max_gen_toks", "do_sample", *_OPTIONS))
        raise SchemeError(f"the generation option '{unknown[0]}' is not known to Crelle; known are {known}")
    until = options.get("until") or []
    stop = tuple(s for s in ([until] if isinstance(until, str) else until) if s)
    found: dict[str, Any] = {"temperature": 1.0} if options.get("do_sample") else {}
    found |= {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    if options.get("do_sample") is False or not found.get("temperature"):
        found = {}
    else:
        found |= {"seed": int(torch.randint(2**31, ())), "top_k": max(0, int(found.get("top_k", 0)))}
    count = next((options[name] for name in _MAX_TOKENS if options.get(name) is not None), max_tokens)
    return Sampling(max_tokens=int(count), stop=stop, **found)
