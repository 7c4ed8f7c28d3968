"""Decoding on a GPU: the whole step for one token of up to four sequences is one CUDA graph, replayed for every token.

A step works on buffers that stay where they are: token ids, positions, keys and values up to a capacity, logits. A
cache that comes with a prompt is copied into such a state once and lives there on; when it is dropped, the state, with
its captured graph, waits for the next one.
"""

import weakref
from collections.abc import Callable
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor

from crelle.errors import CapacityError, NumericsError
from crelle.kernels import cuda
from crelle.kernels.cuda.decode_step import Step, supports
from crelle.kernels.cuda.fused_linear import STEPPED
from crelle.kernels.cuda.graphs import capture
from crelle.kernels.executor import DecoderModules

MAX_ROWS = 4  # sequences of a step
_LEAST = 512  # tokens of the smallest state


class ContiguousCache(Protocol):
    """Keys and values [2, B, Hkv, capacity, D] of each layer; crelle.models.cache has such."""

    layers: list[Tensor]
    length: int

    def advance(self, tokens: int) -> None: ...


def why_not(model: DecoderModules) -> str | None:
    """Return why a model decodes layer by layer on its device, or None when its step can be a graph."""
    if model.device.type != "cuda":
        return f"graphs of a whole step run on a GPU, not on {model.device.type}"
    if reason := cuda.available():
        return f"a whole step needs the CUDA kernels, and this process {reason}"
    if model.dtype not in (torch.float16, torch.bfloat16):
        return f"a whole step computes in 16 bits, the model in {str(model.dtype).removeprefix('torch.')}"
    if others := sorted({linear.kernel for linear in model.linears()} - STEPPED):
        return f"kernel '{others[0]}' is not part of the step"
    return supports(model.spec, model.dtype)


def graphed(model: DecoderModules) -> "GraphedDecoder | str":
    """Return the graphs of a model, or the sentence that says why it has none."""
    return why_not(model) or GraphedDecoder(model)


class GraphedDecoder:
    """Takes a model's caches over, one state each, and replays its step on them; threads take turns."""

    def __init__(self, model: DecoderModules) -> None:
        self.context, self.max_rows = model.spec.context, MAX_ROWS
        self.run = Step(model)  # the step itself, which others may run on buffers of their own
        self._model: Any = weakref.ref(model)  # which keeps this object
        self._leased: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()
        self._free: list[_State] = []
        self._lock = RLock()  # held from the copy into a state's buffers to the copy out of them

    @torch.inference_mode()
    def step(self, tokens: Tensor, cache: ContiguousCache) -> Tensor:
        """Return logits f32 [B, 1, V] for one more token [B, 1] of each sequence in the cache."""
        with self._lock:
            state = self._state(cache, cache.length + 1)
            logits = state.replay(tokens[:, 0], cache.length).clone()
        cache.advance(1)
        return logits[:, None]

    @torch.inference_mode()
    def generate(self, ids: Tensor, tokens: int, replayed: Callable[[], None] | None = None) -> Tensor:
        """Return the `tokens` most likely ids [B, tokens] after a prompt [B, T], without synchronizing between them.

        `replayed` is called after every replay was enqueued, for those who time them.
        """
        model = self._model()
        assert model is not None
        cache = model.new_cache(ids.shape[0])
        first = model(ids, cache, last=True)[:, -1].argmax(-1)
        with self._lock:
            state = self._state(cache, cache.length + tokens)
            state.begin(first, cache.length)
            for _ in range(tokens - 1):
                state.replay_greedily()
                if replayed:
                    replayed()
            cache.advance(tokens - 1)
            made = state.at.made[:, :tokens].clone()
        if bool((made < 0).any()):
            raise NumericsError("the model's logits are not finite (NaN): the checkpoint or a kernel is broken")
        return made

    def _state(self, cache: ContiguousCache, need: int) -> "_State":
        """Return the state that holds the cache, with room for `need` tokens; move the cache there if it is not."""
        if need > self.context:
            raise CapacityError(f"{need} tokens do not fit the model's context of {self.context}")
        held = self._leased.get(cache)
        if held is not None and held.capacity >= need:
            return held
        state = self._take(cache, need)
        for mine, theirs in zip(state.kv, cache.layers, strict=True):
            mine[:, :, :, : cache.length] = theirs[:, :, :, : cache.length]
        cache.layers = list(state.kv)
        self._leased[cache] = state
        weakref.finalize(cache, self._free.append, state)
        return state

    def _take(self, cache: ContiguousCache, need: int) -> "_State":
        B = cache.layers[0].shape[1]
        for i, state in enumerate(self._free):
            if state.at.ids.shape[0] == B and state.capacity >= need:
                return self._free.pop(i)
        capacity = min(self.context, max(_LEAST, 1 << (need - 1).bit_length()))
        return _State(self.run, cache, capacity)


class _State:
    """The buffers of some sequences and the graphs on them."""

    def __init__(self, step: Step, cache: ContiguousCache, capacity: int) -> None:
        from crelle.kernels.cuda.embed_argmax import State

        like = cache.layers[0]
        _, B, heads, _, size = like.shape
        self.capacity = capacity
        self.kv = [like.new_zeros(2, B, heads, capacity, size) for _ in cache.layers]
        self.at = State.new(B, capacity, like.device)  # ids, positions, what was made
        self._step = step
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self.logits: Tensor

    def replay(self, ids: Tensor, length: int) -> Tensor:
        """Run the step for ids [B] behind `length` tokens; return the logits, which the next replay overwrites."""
        graph = self._graph(greedy=False)
        self.at.ids.copy_(ids)
        self.at.position.fill_(length)
        graph.replay()
        return self.logits

    def begin(self, ids: Tensor, length: int) -> None:
        """Prepare for `replay_greedily`: the next ids, and how many tokens are in the cache."""
        self._graph(greedy=True)
        self.at.ids.copy_(ids)
        self.at.position.fill_(length)
        self.at.made[:, 0] = ids
        self.at.step.fill_(1)

    def replay_greedily(self) -> None:
        """Run the step and take the most likely ids as the next ones; they are noted in `at.made`."""
        self._graphs[True].replay()

    def _graph(self, greedy: bool) -> torch.cuda.CUDAGraph:
        if greedy not in self._graphs:
            last = [kv[:, :, :, -1].clone() for kv in self.kv]  # the warm-up writes the last token's place
            self.at.position.fill_(self.capacity - 1)

            def reset() -> None:
                for kv, was in zip(self.kv, last, strict=True):
                    kv[:, :, :, -1] = was
                self.at.step.zero_()

            self._graphs[greedy], _ = capture(lambda: self._run(greedy), reset=reset)
        return self._graphs[greedy]

    def _run(self, greedy: bool) -> None:
        from crelle.kernels.cuda import embed_argmax

        logits = self._step(self.at.ids, self.at.position, self.kv)
        if greedy:
            embed_argmax.greedy(logits, self.at)
        else:
            self.logits = logits
