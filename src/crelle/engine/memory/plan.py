"""How many pages fit a memory budget.

    budget = weights + working space + pages

weights         what the kernels multiply with, at every precision that is served, the embedding and the norms. On a
                CPU the file they came from stays mapped, and the system may drop those pages at any time: not counted.
working space   the activations of one step: its residual stream, the widest layer, the logits of all sampled rows; on a
                GPU also a prompt's keys and values in 16 bits, block tables, the angles of rope, and workspaces of
                cuBLAS and split-K
pages           the rest: keys and values of all layers, scales and zeros counted

What a budget is where none was given: crelle.engine.memory.defaults.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crelle.errors import CapacityError, SchemeError
from crelle.formats.base import nbytes
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda.experts.host_memory import offload_of
from crelle.kernels.cuda.step.fuse import copy_bytes
from crelle.kernels.cuda.step.graph_inputs import BUCKETS, MAX_POSITIONS
from crelle.kernels.cuda.step.prefill_graph import KEYS, ROWS, SEQUENCES
from crelle.kernels.reference_attention import SLAB
from crelle.kernels.spec import DecoderSpec
from crelle.models.executors import page_dtype
from crelle.models.loader import Model

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
TYPICAL = 1024  # tokens of a sequence by which batches are estimated
_LEAST_PAGE = 16  # tokens of a page on a GPU, at least
_ASIDE = 128 << 20  # bytes: cuBLAS's workspaces, 32 MiB for each of three streams; sums of parts
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Read 24GB, 512 MB, 1.5GiB or a number of bytes; GB is 10^9 bytes, GiB 2^30."""
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        found = _SIZE.fullmatch(str(text).strip())
        if not found or (found[3] and not found[2]):
            raise SchemeError(f"a memory size must look like 24GB, 512MB, 1.5GiB or 800000, got '{text}'")
        number, unit, binary, _ = found.groups()
        size = int(float(number) * (_BINARY if binary else _UNITS)[unit.lower()])
    if size < 1:
        raise SchemeError(f"a memory size must be at least one byte, got '{text}'")
    return size


def show_bytes(size: int) -> str:
    """Write a size for people: 1.42 GB."""
    if size < 1000:
        return f"{size} bytes"
    number, units = size / 1000, ["kB", "MB", "GB"]
    while number >= 999.5 and len(units) > 1:  # would be shown as 1000
        number, units = number / 1000, units[1:]
    return f"{number:.3g} {units[0]}" if number < 999.5 else f"{number:,.0f} {units[0]}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What memory is used for; all sizes in bytes."""

    kv: KVFormat
    weights: int
    working: int
    page_bytes: int  # of all layers together
    pages: int
    context: int
    max_batch: int
    budget: int = 0  # tokens of a step
    reason: str = ""  # where `total` comes from

    @property
    def cache(self) -> int:
        return self.pages * self.page_bytes

    @property
    def total(self) -> int:
        return self.weights + self.working + self.cache

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.pages * self.kv.page

    def batch(self, tokens: int) -> int:
        """Return how many sequences of so many tokens can run at once."""
        return min(self.max_batch, self.pages // -(-tokens // self.kv.page))

    @property
    def typical(self) -> int:
        """Tokens of a sequence by which batches are estimated."""
        return min(TYPICAL, self.context)

    @property
    def parts(self) -> str:
        return (
            f"weights {show_bytes(self.weights)}, workspace {show_bytes(self.working)}, "
            f"{self.kv} cache {show_bytes(self.cache)} ({self.pages} pages of {self.kv.page} tokens): room for "
            f"{self.tokens} tokens, {self.batch(self.typical)} sequences of {self.typical}"
        )

    def __str__(self) -> str:
        return f"{show_bytes(self.total)}: {self.parts}"


def plan(
    models: Iterable[Model],
    kv: KVFormat,
    *,
    memory: str | int | None,
    pages: int | None,
    max_batch: int,
    budget: int,
    draft: Model | None = None,
) -> MemoryPlan:
    """Share out a memory budget among the models' precisions, working space and pages; or take `pages` as given.

    draft: a model that guesses tokens; its own pages are as many.
    """
    models = list(models)
    model, each = models[0], page_bytes(models[0], kv, draft)
    weights = weight_bytes(models if draft is None or draft in models else [*models, draft])

    def working(pages: int) -> int:
        return working_bytes(model, max_batch, budget, pages * kv.page)

    if pages is None:
        assert memory is not None, "give a budget or the number of pages"
        size = parse_bytes(memory)
        most = max(0, size - weights) // each
        over = range(1, most + 1)  # the working space grows with the pages, up to the context
        if (pages := bisect_left(over, True, key=lambda n: weights + working(n) + n * each > size)) < 1:
            raise CapacityError(
                f"a memory limit of {show_bytes(size)} leaves no room for the KV cache: the weights take "
                f"{show_bytes(weights)}, the workspace {show_bytes(working(1))}, one page of {kv.page} tokens "
                f"{show_bytes(each)}; allow more memory, or choose fewer bits, a smaller batch or a smaller token "
                "budget"
            )
    return MemoryPlan(kv, weights, working(pages), each, pages, model.spec.context, max_batch, budget)


def kv_heads(model: Model) -> int:
    """Return the heads that keys and values have."""
    return model.spec.kv_heads


def page_bytes(model: Model, kv: KVFormat, draft: Model | None = None) -> int:
    """Return the bytes of one page, all layers together, and of the page of a draft model that goes with it."""
    own = page_bytes_of(model.spec, kv, page_dtype(model).itemsize)
    return own if draft is None else own + page_bytes(draft, draft_kv(kv.page))


def draft_kv(page: int) -> KVFormat:
    """Return how a draft model stores keys and values: uncoded, in pages of as many tokens as the target's."""
    return KVFormat.parse(f"16:page={page}")


def page_bytes_of(spec: DecoderSpec, kv: KVFormat, element_size: int) -> int:
    """Return the same of a decoder that is only described; `element_size`: bytes of values that are not coded."""
    each = spec.kv_heads, spec.head_size, element_size
    return sum(own.page_bytes(*each) for own in kv.layers(len(spec.layers)))


def working_bytes(model: Model, max_batch: int, budget: int, tokens: int | None = None) -> int:
    """Bound the values that a step of `budget` tokens holds at one time: see EagerExecutor, CudaExecutor.

    tokens: that the cache holds, where they are fewer than the context.
    """
    return working_bytes_of(
        model.spec, max_batch, budget, model.dtype.itemsize if model.device.type == "cuda" else None, tokens
    )


def working_bytes_of(
    c: DecoderSpec, max_batch: int, budget: int, gpu_element_size: int | None, tokens: int | None = None
) -> int:
    """Return the same of a decoder that is only described; bytes of an activation on a GPU, None on a CPU."""
    row = _row_values(c)
    scores = 2 * c.heads * SLAB  # and their exponentials, where a prompt's tokens attend together
    logits = 4 * 3 * max_batch * c.vocabulary  # their softmax, one sorted
    if gpu_element_size is None:
        return 4 * budget * (row + scores) + logits
    longest = c.context if tokens is None else min(c.context, tokens)
    read = 2 * c.kv_heads * c.head_size * longest
    tables = 4 * BUCKETS[-1] * -(-longest // _LEAST_PAGE)  # of pages
    angles = 4 * c.head_size * (c.context if c.context <= MAX_POSITIONS else longest) * len(c.ropes)
    step = max(4 * budget * (row + scores), gpu_element_size * (budget * row + read) + _ASIDE)
    return step + prefill_graph_bytes(c, budget, gpu_element_size, longest) + logits + tables + angles


def _row_values(c: DecoderSpec) -> int:
    """Bound the values of a token at one time: inputs, outputs and what is made of them, for each of its experts."""
    slots = max((layer.mlp.experts.top for layer in c.layers if layer.mlp.experts is not None), default=0)
    mixture = slots * (-(-c.inner // 256) * 256 + c.width)
    return 4 * c.width + max(4 * c.inner, mixture) + 4 * c.heads * c.head_size


def prefill_graph_bytes(c: DecoderSpec, budget: int, element_size: int, longest: int) -> int:
    """Bound what graphs of prefills hold: their memory is their own."""
    rows, keys = min(budget, ROWS[-1]), min(longest, KEYS)
    row = _row_values(c)
    return element_size * (rows * row + 2 * c.kv_heads * c.head_size * keys) + 4 * SEQUENCES[-1] * c.vocabulary


def weight_bytes(models: Iterable[Model]) -> int:
    """Count what models hold, once where they share it."""
    sizes: dict[int, int] = {}
    for model in models:
        away = set[int]()
        if (offload := offload_of(model)) is not None:
            away, sizes[id(offload)] = set(map(id, _of_experts(model))), offload.gpu_bytes
        for linear in model.linears():
            if id(linear) in away:  # in host memory
                _count(linear.bias, sizes)
                continue
            _count(linear.prepared.data, sizes)
            _count(linear.bias, sizes)
        if model.device.type == "cuda":  # small matrices a second time, as the step of few sequences reads them
            apart = {id(model.head), *map(id, _of_experts(model))}
            sizes[id(model)] = copy_bytes((x for x in model.linears() if id(x) not in apart), model.dtype.itemsize)
        embedding = model.embedding.weight
        if embedding is not model.head.weight:
            sizes[id(embedding)] = nbytes(embedding)
        for module in model.modules():
            for name in ("weight", "bias"):
                if isinstance(t := getattr(module, name, None), Tensor):
                    _count(t, sizes)
    return sum(sizes.values())


def _of_experts(model: Model) -> list[Any]:
    """Return the linears of which a token takes some."""
    layers: Any = model.layers
    mixtures = [layer.mlp.experts for layer in layers if layer.spec.mlp.experts is not None]
    return [linear for each in mixtures for expert in each for linear in (expert.gate, expert.up, expert.down)]


def _count(x: Any, sizes: dict[int, int]) -> None:
    """Note the bytes of a kernel's weight: a tensor, something that knows its size, or parts of those."""
    if isinstance(x, Tensor):
        if x.device != torch.device("meta"):
            sizes[x.data_ptr()] = x.numel() * x.element_size()
    elif isinstance(x, tuple):
        for part in x:
            _count(part, sizes)
    elif hasattr(x, "nbytes"):
        sizes[id(x)] = x.nbytes
    elif hasattr(x, "data"):  # CpuWeight
        _count(x.data, sizes)
    elif hasattr(x, "tensors"):
        for part in x.tensors().values():
            _count(part, sizes)
