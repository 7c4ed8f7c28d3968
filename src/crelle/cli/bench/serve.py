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
            metavar="[MODEL]", help="Crelle checkpoint, Hugging Face directory, or .gguf file; or use --shape or --url."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Trace to replay: a CSV of arrival time, prompt tokens and completion tokens."),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            "--clients",
            help="Numbers of concurrent clients, e.g. 1,16; each sends its next request when the last one completes.",
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", help="Batch sizes for decoding only, e.g. 1,4,16; or none.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Instead of MODEL: the URL of an OpenAI-compatible server.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="With --url: API key.", envvar="CRELLE_API_KEY")
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="With --url: request completions of full length; not every server supports this."
        ),
    ] = False,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Instead of MODEL: a model shape with random weights, e.g. llama2-7b.")
    ] = None,
    scheme: Annotated[
        list[str] | None, typer.Option("--scheme", help="With --shape: quantization scheme; repeatable.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="With --shape: run only the first N layers.")] = None,
    kv: Annotated[
        list[str] | None, typer.Option("--kv", help="KV cache format, e.g. 16, 4 or k4v2; repeatable.")
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            "--memory",
            help="Memory limit, e.g. 24GB; repeatable, one row each. With --batch: also run the largest batch "
            "that fits.",
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option("--max-batch", help="Maximum number of concurrent sequences; default: what fits in memory."),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget",
            help="Maximum number of tokens per step, including prompts; default: 512 to 2048, depending on memory.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            help="Clients: duration in seconds (default: 20). Trace: replay only the requests due before this time.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Trace: average requests per second; 0: all at once. Default: as recorded."),
    ] = None,
    stop: Annotated[
        float | None,
        typer.Option("--stop", help="Trace: stop after this time in seconds, even if requests are running."),
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="Trace: replay only the first N requests.")] = None,
    prompt: Annotated[int, typer.Option("--prompt", help="Clients: tokens per prompt.")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", help="Clients and --batch: tokens per completion.")] = 64,
    context: Annotated[
        int, typer.Option("--context", help="With --batch: context length before the first decoded token.")
    ] = 1024,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="With --batch on a GPU: profile the time of a step by kernel.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Random seed for the prompts.")] = 0,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--fast",
            help="Batch-invariant results (the same bits in any batch), or faster; default: exact on a CPU only.",
        ),
    ] = None,
    speculate: Annotated[
        str, typer.Option("--speculate", help="Clients and trace: what guesses tokens, off or ngram (see `serve`).")
    ] = "off",
    device: Annotated[str, typer.Option("--device", help="Device: cpu, cuda or auto.")] = "auto",
    threads: Threads = None,
    kernel: KernelName = None,
    results: ResultFile = None,
    json: Json = False,
) -> None:
    """Measure an engine under load: throughput, latency and cache usage.

    `--clients` is a closed loop, `--trace` replays a recorded load (for example the Azure LLM inference traces), and
    `--batch` measures decoding only, after a context. The output is first checked against one forward pass. The time to
    the first token counts from when the request was due. Steps with prompt tokens count as prefill time, all others as
    decoding time. With `--url` the same load goes over HTTP to a running server, and prompts consist of words.

    **Example**: `crelle bench serve out/m --clients 16 --kv 4 --seconds 30`

    **Example**: `crelle bench serve out/m --trace conv.csv --rate 2 --seconds 120 --memory 1GB --out results/trace`

    **Example**: `crelle bench serve --shape llama2-7b --scheme atom:w=4,a=4 --kv 4 --batch 128 --breakdown`

    **Example**: `crelle bench serve --shape llama2-7b --scheme fp16 --scheme bcq:bits=4,group=128 --kv 16 --kv 4
    --batch 1,2,4,8,16,32,64,128,256 --memory 24GB --device cuda --out bench/results/h200-serve`
    """
    from crelle.bench.load.decode_throughput import parse_batches

    use_threads(threads)
    if sum(x is not None for x in (model, shape, url)) != 1:
        raise SchemeError("give one of MODEL (a path), --shape (a name such as llama2-7b) or --url (a server)")
    sizes = [] if batch in (None, "none") else parse_batches(batch or "")
    if trace is None and clients is None and not sizes and not (batch and memory):
        raise SchemeError("choose a load: --clients N, --trace FILE or --batch 1,4,16")
    crowds = [] if clients is None else parse_batches(clients, "--clients")
    recorded = _Trace(trace, rate, seconds, requests)
    if url is not None:
        if sizes:
            raise SchemeError("--batch measures an engine in this process and does not apply to --url")
        due = None if trace is None else recorded.requests(1 << 20)
        over_http(url, api_key, due, crowds, seconds or 20.0, prompt, tokens, seed, ignore_eos, results, json)
        return
    limits = {"max_batch": max_batch, "budget": budget and max(budget, max_batch or 0)}
    options: dict[str, Any] = {**limits, "batch_invariant": exact, "speculate": speculate}
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
            raise SchemeError("--scheme and --layers apply to --shape only; MODEL runs as it is stored")
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
            raise CapacityError(f"does not fit in the memory of this GPU: {str(e).split('. ')[0]}") from None

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
