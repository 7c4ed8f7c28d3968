"""A mixture of experts larger than the GPU's memory limit: tokens per second beside the bound by PCIe.

    python bench/gpu/experts_streamed.py OUT.json [--shape qwen3-30b-a3b] [--memory 8GB] [--batches 1,8] [--layers N]
    python bench/gpu/experts_streamed.py OUT.json --bandwidth

Random weights of the real shape in an Engine, as `generate` and `serve` run it, loaded with a memory limit: the experts
that do not fit stay in pinned host memory. Checked first, on two layers: logits of prompts and steps have the same bits
as when all experts are on the GPU (batch-invariant, and of one sequence), while experts change places.

Uses and hits of experts are counted on the device. Bytes over PCIe: the misses' share of what the experts of a step
take, each read once (for a batch: as many as are chosen by chance). The bound is the time that these bytes take at the
speed of a plain copy in the same run. `planned`: what `crelle plan` predicts for this share of hits.

`--skew`: routing prefers some experts, as trained models do: rows of the router's matrix are larger by exp of a normal
value of this standard deviation; 0: all are taken as often.

`--bandwidth` times the kernels of a layer by themselves: experts on the GPU, in pinned host memory, and plain copies of
blocks in pieces of an expert and of 256 MB.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from experts_cuda import Repeated, decoder_of

from crelle.bench.engine_decode import EngineDecoder
from crelle.bench.environment import write_result
from crelle.bench.kernels.cuda_timer import gpu
from crelle.bench.kernels.random_matrices import random_generator, random_matrix
from crelle.bench.load.no_tokenizer import NoTokenizer
from crelle.bench.planner.plan import plan, step_work
from crelle.bench.planner.plan_shapes import LARGE, describe
from crelle.engine.engine import Engine
from crelle.engine.llm import LLM
from crelle.engine.memory.experts import expert_offload
from crelle.engine.memory.plan import parse_bytes
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.formats.dense import DenseTensor
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.executor import supports_model
from crelle.kernels.cuda.experts import host_memory, products
from crelle.kernels.cuda.experts.host_memory import ExpertOffload
from crelle.kernels.cuda.experts.products import ExpertWeights
from crelle.kernels.cuda.experts.streaming import ExpertStreams
from crelle.kernels.cuda.experts.weights import lay_out_experts
from crelle.kernels.cuda.launch import recording
from crelle.kernels.cuda.planes.weight_layout import lay_out
from crelle.kernels.executor import Chunk
from crelle.models.loader import build
from crelle.quantizers.scheme import parse

ALL = (1, 2, 8, 16, 64, 256)  # tokens
GPT_OSS_120B = {"width": 2880, "inner": 2880, "count": 128, "top": 4}
QWEN3_30B_A3B = {"width": 2048, "inner": 768, "count": 128, "top": 8}
CONTEXT, TOKENS, ROUNDS, SCHEME = 4, 48, 2, "rtn:bits=4,group=128"


def seconds(run: Callable[[], object], times: int = 8) -> float:
    """Return the time of one run on the device."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


# --- a layer by itself ------------------------------------------------------------------------------------------------


def layer_of(width: int, inner: int, count: int, top: int, place: Callable[[Tensor], Tensor]) -> tuple[Any, int]:
    """Return experts of random bits whose blocks `place` has put somewhere, and the bytes of one."""
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    generator = random_generator(0, "cuda")
    made = {n: lay_out(random_matrix(parse(SCHEME), *s, generator)) for n, s in shapes.items()}
    experts, kept = [], []
    size = sum(t.numel() * t.element_size() for w in made.values() for t in (w.words, w.scales))
    for _ in range(count):
        each = {}
        for n, w in made.items():
            each[n] = (host_memory.with_tensors(w, place), None)
        experts.append(each)
        kept.append(each)
    e = lay_out_experts(experts, top, True, "silu")
    return (ExpertWeights(e.table.cuda(), e.gate, e.down, e.count, e.top, e.normalize, e.activation), kept), size


def few(x: Tensor, logits: Tensor, e: ExpertWeights) -> Tensor:
    return products.down(products.up(x, logits, e), logits, e)


def many(x: Tensor, logits: Tensor, e: ExpertWeights) -> Tensor:
    chosen, weights = products.route(logits, e)
    slots = products.sort(chosen, e, products.at_a_time(len(x), e))
    return products.combine(products.grouped_down(products.grouped_up(x, slots, e), slots, e), weights)


def pinning() -> list[dict[str, Any]]:
    """Compare pages of 4 KiB with those of 2 MiB: pinning them, and reading experts there."""
    rows = list[dict[str, Any]]()
    for pages, allocate in (("4 KiB", host_memory.small_pages), ("2 MiB", host_memory.huge_pages)):
        begun, _pinned_copy.at = perf_counter(), 0  # type: ignore[attr-defined]
        host = allocate(1 << 30)
        host_memory.pin(host)
        rows.append({"pages": pages, "pinned_gb_per_s": len(host) / 1e9 / (perf_counter() - begun)})
        print(rows[-1], flush=True)
        rows += layer_rows(QWEN3_30B_A3B, partial(_pinned_copy, host=host), {"place": f"host, {pages}"}, (1, 8))
        torch.cuda.synchronize()
        host_memory.unpin([host.data_ptr()])
    return rows


def bandwidth(tokens: Sequence[int]) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    host = host_memory.small_pages(1 << 31)
    host_memory.pin(host)
    device = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for piece in (1 << 19, 5 << 19, 13 << 20, 1 << 28):
        rows.append({"copy_bytes": piece, "gb_per_s": copy_speed(host, device, piece)})
        print(rows[-1], flush=True)
    for name, shape in (("qwen3-30b-a3b", QWEN3_30B_A3B), ("gpt-oss-120b", GPT_OSS_120B)):
        for place in ("GPU", "host"):
            _pinned_copy.at = 0  # type: ignore[attr-defined]
            put = Tensor.clone if place == "GPU" else partial(_pinned_copy, host=host)
            rows += layer_rows(shape, put, {"shape": name, "place": place}, tokens)
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    host_memory.unpin([host.data_ptr()])
    return rows


def copy_speed(host: Tensor, device: Tensor, piece: int) -> float:
    """Return GB/s of copies of this size."""

    def copies() -> None:
        for i in range(len(device) // piece):
            device[i * piece : (i + 1) * piece].copy_(host[i * piece : (i + 1) * piece], non_blocking=True)

    return len(device) // piece * piece / seconds(copies, 4) / 1e9


def layer_rows(
    shape: dict[str, int], put: Callable[[Tensor], Tensor], facts: dict[str, str], tokens: Sequence[int] = ALL
) -> list[dict[str, Any]]:
    (e, _kept), size = layer_of(**shape, place=put)
    sizes = [(n, way) for n in tokens for way in (few, many) if n <= 16 or way is many]
    with recording() as found:
        for n, way in sizes:
            way(torch.zeros(n, shape["width"], device="cuda").half(), torch.zeros(n, e.count).cuda(), e)
    jit.compile_all(sorted(found))
    rows = []
    for n, way in sizes:
        x = torch.randn(n, shape["width"], device="cuda").half()
        each = [torch.randn(n, e.count, device="cuda") for _ in range(8)]
        taken = [len(set(v.topk(e.top, -1)[1].flatten().tolist())) for v in each]
        read = n * e.top if way is few else sum(taken) / len(taken)
        took = seconds(partial(_all, way, x, each, e), 3) / len(each)
        rows.append({**facts, "way": way.__name__, "tokens": n, "microseconds": 1e6 * took, "experts": read})
        rows[-1] |= {"distinct": sum(taken) / len(taken), "gb_per_s": read * size / took / 1e9}
        print(rows[-1], flush=True)
    return rows


def _all(way: Callable[..., Tensor], x: Tensor, each: list[Tensor], e: ExpertWeights) -> None:
    for logits in each:
        way(x, logits, e)


def _pinned_copy(t: Tensor, host: Tensor) -> Tensor:
    """Copy a tensor into the next place of pinned memory, from the beginning again where that ends."""
    n = t.numel() * t.element_size()
    at: int = -(-_pinned_copy.at // 256) * 256  # type: ignore[attr-defined]
    at = at if at + n <= len(host) else 0
    _pinned_copy.at = at + n  # type: ignore[attr-defined]
    there = host[at : at + n].view(t.dtype).view(t.shape)
    there.copy_(t)
    return there


# --- in the engine ----------------------------------------------------------------------------------------------------


class Skewed(Repeated):
    """Random weights whose routers prefer some experts: the larger rows of the router's matrix."""

    skew = 0.0

    def matrix(self, module: str) -> Any:
        w = super().matrix(module)
        if self.skew and module.endswith((".gate", ".router")) and "experts" not in module:
            generator = torch.Generator(device="cpu").manual_seed(len(module))
            by = torch.exp(self.skew * torch.randn(w.shape[0], 1, generator=generator))
            return DenseTensor((w.dequantize(torch.float32) * by.to(w.device)).half())
        return w


def llm_of(shape: str, scheme: str, layers: int | None, memory: str | int | None, skew: float) -> LLM:
    """Load as LLM.load does; memory None: everything on the GPU."""
    device = torch.device("cuda")
    weights = Skewed({**LARGE[shape], "max_position_embeddings": 4096}, scheme, "cuda", layers=layers)
    weights.skew = skew
    kv = KVFormat.parse("16")
    offload = None if memory is None else expert_offload(weights, device, memory, kv)
    model = build(weights, device, offload=offload)
    assert (why := supports_model(model, kv)) is None, why
    llm = LLM(model, cast(Tokenizer, NoTokenizer()), weights)
    llm.memory = None if memory is None else parse_bytes(memory)
    return llm


@torch.inference_mode()
def check(shape: str, scheme: str, batch_invariant: bool) -> int:
    """Compare logits of a model whose experts are streamed with those of one on the GPU; return exchanges seen."""
    ids = torch.randint(1000, (4, 700), generator=torch.Generator().manual_seed(0)).tolist()
    config, device = {**LARGE[shape], "max_position_embeddings": 4096, "vocab_size": 1024}, torch.device("cuda")
    made, swapped = [], 0
    for room in (None, 330 << 20):  # 128 MiB of which are for staging
        weights = Skewed(config, scheme, "cuda", layers=2)
        weights.skew = 1.0
        offload = None if room is None else ExpertOffload(room, device, fits=0, host_free=lambda: 1 << 40)
        llm = LLM(build(weights, device, offload=offload), cast(Tokenizer, NoTokenizer()), weights)
        engine = Engine(llm, pages=256, max_batch=8, budget=2048, batch_invariant=batch_invariant)
        executor = engine.runner.cuda_executor(None)
        assert executor is not None
        each = 700 // engine.kv.page + 1
        pages = [list(range(i * each, (i + 1) * each)) for i in range(4)]
        lengths = (600, 60) if batch_invariant else (60,)  # staged, in place
        jit.compile_all(sorted(executor.kernels(range(1, 5), [4 * n for n in lengths])))
        found = []
        for n in lengths:
            chunks = [Chunk(i[:n], 0, p, True) for i, p in zip(ids, pages, strict=False)]
            found.append(executor.run(chunks).cpu())
        for at in range(60, 180):
            chunks = [
                Chunk([i[at]], at, p, True)
                for i, p in zip(ids, pages[: 1 + at % 4 if batch_invariant else 1], strict=False)
            ]
            found.append(executor.run(chunks).cpu())
        made.append(found)
        if (streams := executor.step.streams) is not None:
            swapped = streams.swapped
            print(offload, f"hits {streams.hits} of {streams.uses}, swapped {swapped}", flush=True)
        del llm, engine, executor
        gc.collect()
        torch.cuda.empty_cache()
    for i, (a, b) in enumerate(zip(*made, strict=True)):
        if not a.isfinite().all():
            raise SystemExit(f"logits of call {i} are not finite")
        if not torch.equal(a, b):
            apart = float((a - b).abs().max())
            raise SystemExit(f"logits of call {i} differ by {apart:.3g} where experts are streamed; not timed")
    if not swapped:
        raise SystemExit("no expert changed its place while logits were compared")
    return swapped


def counted(streams: ExpertStreams) -> tuple[int, int]:
    """Return uses and hits until now, as the device counted them."""
    counts = streams.counts.cpu()
    hits = sum(int(counts[layer.counts_at + layer.e.count]) for layer in streams.layers)
    return int(counts.sum()) - hits, hits


def measure(llm: LLM, given: argparse.Namespace, batch: int, link: float) -> dict[str, Any]:
    """Return the speed of decoding, after experts have had time to change places."""
    decoder = decoder_of(llm, batch, CONTEXT + TOKENS + 2)
    executor = decoder.engine.runner.cuda_executor(None)
    assert executor is not None
    streams, spec = executor.step.streams, llm.model.spec
    assert streams is not None, "everything fits this limit: nothing is streamed"
    generator = torch.Generator().manual_seed(batch)
    row: dict[str, Any] = {"batch": batch}
    for _ in range(ROUNDS):
        ids = torch.randint(spec.vocabulary, (batch, CONTEXT), generator=generator)
        before, swapped = counted(streams), streams.swapped
        made = decoder.generate(ids, TOKENS)
        uses, hits = (b - a for a, b in zip(before, counted(streams), strict=True))
        ms = 1e3 * median(made.steps)
        layer = next(x for x in spec.layers if x.mlp.experts is not None)
        assert layer.mlp.experts is not None
        work = step_work(describe(given.shape, llm.weights.config), parse(given.scheme), llm.kv, batch, CONTEXT)
        read = work.products[1].bytes  # by the experts of a step, each once
        share = hits / uses
        missed = (1 - share) * read
        row |= {"milliseconds_per_step": ms, "tokens_per_second": 1e3 * batch / ms, "share_of_hits": share}
        row |= {"pcie_bytes_per_step": missed, "pcie_bound_milliseconds": missed / link / 1e6}
        row |= {"share_of_bound": missed / link / 1e6 / ms, "swapped": streams.swapped - swapped}
        options: dict[str, Any] = {"memory": given.memory, "batch": batch, "context": CONTEXT, "hits": share}
        planned = plan(describe(given.shape, llm.weights.config), parse(given.scheme), llm.kv, **options).streamed
        row["planned_milliseconds"] = planned and planned.speeds[0].milliseconds_per_step
        print(row, flush=True)
    return row


def prompt_speed(llm: LLM, tokens: int, link: float) -> dict[str, Any]:
    """Return the time of a prompt whose experts are staged."""
    decoder = EngineDecoder(llm, 1, tokens + 2, "kv16")
    executor = decoder.engine.runner.cuda_executor(None)
    assert executor is not None
    jit.compile_all(sorted(executor.kernels([1], [tokens])))
    ids = torch.randint(llm.model.spec.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    took = min(decoder.generate(ids, 1 + 1).first for _ in range(3))
    offload = llm.model.build.offload
    missing = offload.host_bytes - offload.slot_bytes
    bound = missing / link / 1e9
    return {"prompt_tokens": tokens, "seconds": took, "pcie_bound_seconds": bound, "share_of_bound": bound / took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--scheme", default=SCHEME)
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompts", default="1024", help="tokens of prompts; 0: none")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--bandwidth", action="store_true")
    parser.add_argument("--pages", action="store_true", help="also compare sizes of pages of host memory")
    parser.add_argument("--tokens", default=None, help="with --bandwidth: numbers of tokens")
    parser.add_argument("--no-check", action="store_true")
    given = parser.parse_args()
    options = [argument for argument in sys.argv[1:] if argument != str(given.out)]
    command = " ".join(["python", "bench/gpu/experts_streamed.py", given.out.name, *options])
    result: dict[str, Any] = {"command": command, "gpu": gpu()}
    if given.bandwidth:
        write_result(
            given.out, result | {"rows": bandwidth(tuple(map(int, given.tokens.split(","))) if given.tokens else ALL)}
        )
        return
    begun = perf_counter()
    if given.pages:
        result["pages"] = pinning()
    result["exchanges_while_checked"] = (
        [] if given.no_check else [check(given.shape, given.scheme, invariant) for invariant in (True, False)]
    )
    print(f"checked, {perf_counter() - begun:.0f} s", flush=True)
    host = torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    link = copy_speed(host, torch.empty_like(host, device="cuda"), len(host))
    print(f"plain copy: {link:.1f} GB/s", flush=True)
    torch.cuda.empty_cache()
    llm = llm_of(given.shape, given.scheme, given.layers, given.memory, given.skew)
    offload = llm.model.build.offload
    print(f"loaded, {perf_counter() - begun:.0f} s; {offload}", flush=True)
    result |= {"shape": given.shape, "scheme": given.scheme, "layers": len(llm.model.spec.layers)}
    result |= {"memory": given.memory, "skew": given.skew, "plain_copy_gb_per_s": link}
    result |= {"slot_bytes": offload.slot_bytes, "host_bytes": offload.host_bytes, "share_of_experts": offload.share}
    result["rows"] = [measure(llm, given, batch, link) for batch in map(int, given.batches.split(","))]
    result["prompts"] = [prompt_speed(llm, n, link) for n in map(int, given.prompts.split(",")) if n]
    print(*result["prompts"], sep="\n", flush=True)
    result["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    print(f"peak {result['peak_gpu_bytes'] / 1e9:.2f} GB, {perf_counter() - begun:.0f} s", flush=True)
    write_result(given.out, result)


if __name__ == "__main__":
    main()
