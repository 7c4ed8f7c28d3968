"""crelle bench serve: many requests at once, in this process or against a server."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crelle.cli.bench.rows import ResultFile, Rows
from crelle.cli.bench.serve_show import over_http, show_rows
from crelle.cli.common.console import Json, KernelName, Threads, use_threads
from crelle.errors import CapacityError, CrelleError, SchemeError

if TYPE_CHECKING:
    from crelle.bench.load.decode_throughput import DecodeThroughput
    from crelle.bench.load.engine_load import EngineLoadResult
    from crelle.engine.llm import LLM

NAME = "serve"


def run(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL]", help="A checkpoint, a Hugging Face directory or a .gguf file; or use --shape or --url."
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="CSV of arrival, prompt tokens, answer tokens: replay it.")
    ] = None,
    clients: Annotated[
        str | None, typer.Option("--clients", help="So many clients, each asking again when it is answered, e.g. 1,16.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", help="Decoding alone, so many sequences at once, e.g. 1,4,16; or none.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Instead of MODEL: a server that speaks OpenAI's way.")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="For --url.", envvar="CRELLE_API_KEY")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="For --url: ask for answers of full length; not every server can.")
    ] = False,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Instead of MODEL: a real shape with random weights, e.g. llama2-7b.")
    ] = None,
    scheme: Annotated[
        list[str] | None, typer.Option("--scheme", help="With --shape: how its matrices are stored; repeatable.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="With --shape: only the first so many layers.")] = None,
    kv: Annotated[
        list[str] | None, typer.Option("--kv", help="Bits of the cache, e.g. 16, 4 or k4v2; repeatable.")
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            "--memory",
            help="A budget like 24GB; repeatable: a row each. With --batch: the largest batch that it holds, besides.",
        ),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option("--max-batch", help="Sequences that run at once; default: what the memory holds.")
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option("--budget", help="Tokens of a step, prompts included; default: 512 to 2048, as memory allows."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="How long clients ask; 20. Of a trace: what is due before.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Trace: requests per second on average; 0: all at once.")
    ] = None,
    stop: Annotated[
        float | None, typer.Option("--stop", help="Trace: end after so many seconds, whatever is under way.")
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="Trace: only the first so many.")] = None,
    prompt: Annotated[int, typer.Option("--prompt", help="Clients: tokens of a prompt.")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", help="Clients and --batch: tokens of an answer.")] = 64,
    context: Annotated[
        int, typer.Option("--context", help="With --batch: tokens before the first decoded one.")
    ] = 1024,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="With --batch on a GPU: the time of a step by kernel, profiled.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts.")] = 0,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--fast",
            help="Batch-invariant: the same bits in any batch; default: on a CPU exact, on a GPU fast.",
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where to run: cpu, cuda or auto.")] = "auto",
    threads: Threads = None,
    kernel: KernelName = None,
    results: ResultFile = None,
    json: Json = False,
) -> None:
    """Put an engine under load: throughput, waits and the cache's use, as clients would see them.

    `--clients` is a closed loop, `--trace` a recorded one (the CSV files that Azure published, say), `--batch` decoding
    alone behind a context. Each is checked first against one pass of the model. Times to the first token count from
    when a request was due. Steps with tokens of prompts count as time in prompts, all others as decoding. With `--url`
    the same load goes over HTTP to a running server; prompts are then words.

    **Example**: `crelle bench serve out/m --clients 16 --kv 4 --seconds 30`

    **Example**: `crelle bench serve out/m --trace conv.csv --rate 2 --seconds 120 --memory 1GB --out results/trace`

    **Example**: `crelle bench serve --shape llama2-7b --scheme atom:w=4,a=4 --kv 4 --batch 128 --breakdown`

    **Example**: `crelle bench serve --shape llama2-7b --scheme fp16 --scheme bcq:bits=4,group=128 --kv 16 --kv 4
    --batch 1,2,4,8,16,32,64,128,256 --memory 24GB --device cuda --out bench/results/h200-serve`
    """
    from crelle.bench.load.decode_throughput import parse_batches

    use_threads(threads)
    if sum(x is not None for x in (model, shape, url)) != 1:
        raise SchemeError("give one of MODEL, a path, --shape, a name such as llama2-7b, or --url, a server")
    sizes = [] if batch in (None, "none") else parse_batches(batch or "")
    if trace is None and clients is None and not sizes and not (batch and memory):
        raise SchemeError("say what load: --clients N, --trace FILE or --batch 1,4,16")
    crowds = [] if clients is None else parse_batches(clients, "--clients")
    recorded = _Trace(trace, rate, seconds, requests)
    if url is not None:
        if sizes:
            raise SchemeError("--batch is for an engine in this process, not for --url")
        due = None if trace is None else recorded.requests(1 << 20)
        over_http(url, api_key, due, crowds, seconds or 20.0, prompt, tokens, seed, ignore_eos, results, json)
        return
    options = {"max_batch": max_batch, "budget": budget and max(budget, max_batch or 0), "batch_invariant": exact}
    closed = {"seconds": seconds or 20.0, "prompt": prompt, "tokens": tokens}
    decoding = {"context": context, "tokens": tokens, "batch_invariant": exact, "profile": breakdown}
    rows = _Bench(results, device).rows
    for s in _sources(model, shape, scheme, layers, device, kernel):
        for k in kv or ["16"]:
            for b in sizes:
                _decode(rows, s, k, decoding, b)
            for m in (memory or []) if batch is not None else []:
                _decode(rows, s, k, decoding, None, m)
            for m in memory or [None]:  # type: ignore[list-item]
                for n in crowds:
                    _load(rows, s, k, m, {**options, **closed, "clients": n}, seed)
                if trace is not None:
                    _load(rows, s, k, m, {**options, "trace": recorded, "stop": stop}, seed)
        s.drop()
    if rows.finish(json):
        show_rows(rows.rows)
    rows.end(json)


@dataclass(slots=True)
class _Source:
    """A model that is built when it is first needed; where that fails, every row of it says why."""

    name: str
    make: "Callable[[], tuple[LLM, str]]"
    made: "tuple[LLM, str] | None" = None
    failed: CrelleError | None = None

    def get(self) -> "tuple[LLM, str]":
        if self.failed:
            raise self.failed
        if self.made is None:
            try:
                self.made = self.make()
            except CrelleError as e:
                self.failed = e.with_traceback(None)
                raise
        return self.made

    def drop(self) -> None:
        from crelle.bench.decode_cuda import free_memory

        self.made = None
        free_memory()


def _sources(
    model: Path | None,
    shape: str | None,
    schemes: list[str] | None,
    layers: int | None,
    device: str,
    kernel: str | None,
) -> list[_Source]:
    from crelle.bench.load.model_sources import random_llm, stored_llm
    from crelle.bench.model_shapes import config_of
    from crelle.models.loader import choose_device
    from crelle.quantizers.scheme import parse

    if model is not None:
        if schemes or layers:
            raise SchemeError("--scheme and --layers go with --shape; a MODEL is as it was stored")
        return [_Source(model.name, lambda: stored_llm(model, device, kernel))]
    assert shape is not None
    config_of(shape)  # a wrong name or scheme is better told now than after an hour
    chosen, wanted = choose_device(device), schemes or ["fp16", "bcq:bits=4,group=128", "bcq:bits=3,group=128"]
    for s in wanted:
        parse(s)
    return [
        _Source(
            f"{shape} {s}",
            lambda s=s: (random_llm(shape, s, chosen, layers=layers, kernel=kernel), s),  # type: ignore[misc]
        )
        for s in wanted
    ]


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace to be read for a model's context."""

    path: Path | None
    rate: float | None
    seconds: float | None
    limit: int | None  # requests
    _read: dict[int, Any] = field(default_factory=dict)

    def requests(self, context: int) -> Any:
        from crelle.bench.load.trace import read_trace

        assert self.path is not None
        if context not in self._read:
            limits = {"rate": self.rate, "seconds": self.seconds, "requests": self.limit}
            self._read[context] = read_trace(self.path, context=context, **limits)  # type: ignore[arg-type]
        return self._read[context]

    def __str__(self) -> str:
        assert self.path is not None
        how = "as recorded" if self.rate is None else "all at once" if self.rate == 0 else f"{self.rate:g} a second"
        return f"{self.path.name}, {how}"


class _Bench:
    """Rows with what a result file says of the machine."""

    def __init__(self, results: Path | None, device: str) -> None:
        from crelle.bench.kernels.cuda_timer import gpu
        from crelle.models.loader import choose_device

        self.rows = Rows(results, {"gpu": gpu()} if choose_device(device).type == "cuda" else None)


def _guarded(rows: Rows, what: str, measure: "Callable[[], Any]") -> None:
    """Measure one row; memory that a GPU does not have is a sentence, and what was used is given back."""
    import torch

    from crelle.bench.decode_cuda import free_memory

    def guarded() -> Any:
        try:
            return measure()
        except torch.cuda.OutOfMemoryError as e:
            raise CapacityError(f"does not fit this GPU: {str(e).split('. ')[0]}") from None

    rows.add(what, guarded)
    free_memory()


def _decode(
    rows: Rows, source: _Source, kv: str, options: dict[str, Any], batch: int | None, memory: str | None = None
) -> None:
    from crelle.bench.load.decode_throughput import decode, largest_batch

    def measure() -> "DecodeThroughput":
        llm, scheme = source.get()
        size = batch or largest_batch(llm, kv, str(memory), options["context"], options["tokens"])
        return decode(llm, scheme, batch=size, kv=kv, memory=memory, **options)

    size = f"batch {batch}" if batch else f"the largest batch in {memory}"
    _guarded(rows, f"{source.name}, cache of {kv} bits, {size}", measure)


def _load(rows: Rows, source: _Source, kv: str, memory: str | None, options: dict[str, Any], seed: int) -> None:
    from crelle.bench.load.engine_load import serve

    def measure() -> "EngineLoadResult":
        llm, scheme = source.get()
        given, traffic = dict(options), ""
        if isinstance(trace := given.pop("trace", None), _Trace):
            traffic, trace = str(trace), trace.requests(llm.model.spec.context)
        return serve(llm, scheme, trace=trace, traffic=traffic, kv=kv, memory=memory, seed=seed, **given)

    cap, who = f" in {memory}" if memory else "", options.get("clients")
    traffic = f"{who} clients" if who else "the trace"
    _guarded(rows, f"{source.name}, cache of {kv} bits{cap}, {traffic}", measure)
