"""Greedy generations of an Engine, with the time of every token: what `crelle bench decode` times on every device."""

from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor

from crelle.engine.engine import Engine
from crelle.engine.llm import LLM
from crelle.engine.requests.output import Event, OnEvent
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import CapacityError
from crelle.formats.kv.pages import KVFormat

BUDGET = 2048  # tokens of a step, as `LLM.generate` has it


@dataclass(frozen=True, slots=True)
class Generation:
    """What one batch was given, and when."""

    tokens: Tensor  # int64 [B, tokens]
    first: float  # seconds from the request to the first token of the last sequence
    steps: list[float]  # seconds between one token and the next


class EngineDecoder:
    """An engine with pages for `batch` sequences of `length` tokens, which shares no prefixes: every run is alike."""

    def __init__(self, llm: LLM, batch: int, length: int, kv: KVFormat | str | int | None = None) -> None:
        if length > llm.model.spec.context:
            raise CapacityError(f"{length} tokens do not fit the model's context of {llm.model.spec.context}")
        fmt = llm.kv if kv is None else KVFormat.parse(kv)
        pages = batch * -(-length // fmt.page)
        limits = {"pages": pages, "max_batch": batch, "budget": max(BUDGET, batch), "watermark": 0}
        self.engine = Engine(llm, kv=fmt, sharing=False, speculate="off", **limits)  # type: ignore[arg-type]

    def generate(self, ids: Tensor, tokens: int) -> Generation:
        """Continue prompts [B, T] by the likeliest tokens, all of them at once."""
        ends: list[float] = []
        begun = perf_counter()
        handles = [
            self.engine.add(row, Sampling(max_tokens=tokens), ignore_end=True, on_event=None if i else _noting(ends))
            for i, row in enumerate(ids.tolist())
        ]
        self.engine.run()
        said = []
        for handle in handles:
            if (error := handle.outputs[0].error) is not None:
                raise error
            said.append(handle.outputs[0].completion.tokens)
        return Generation(torch.tensor(said), ends[0] - begun, [b - a for a, b in pairwise(ends)])


def _noting(ends: list[float]) -> OnEvent:
    def on_event(event: Event) -> None:
        if event.token is not None:
            ends.append(perf_counter())

    return on_event
