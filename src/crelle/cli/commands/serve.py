"""crelle serve: answer many clients over HTTP, in OpenAI's protocol."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crelle.cli.common.console import Json, Model, err, print_json, use_threads
from crelle.cli.common.option_groups import ModelOptions, SpeculationOptions, model_options, speculation_options
from crelle.printable import printable

if TYPE_CHECKING:
    from crelle.server.app import Server

NAME = "serve"


@model_options
@speculation_options
def run(
    model: Model,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 listens on all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 picks a free port.")] = 8000,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Memory limit for weights, workspace and KV cache, e.g. 24GB; default on a GPU: 90% of the "
            "free memory (experts that do not fit are streamed from host memory); "
            "on a CPU: a cache of at most a quarter of the memory.",
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
    queue_limit: Annotated[
        int, typer.Option("--queue-limit", help="Maximum number of waiting prompts; further requests get status 429.")
    ] = 256,
    timeout: Annotated[float, typer.Option("--timeout", help="Maximum time per request, in seconds.")] = 600.0,
    grace: Annotated[
        float, typer.Option("--grace", help="Time to finish running requests after SIGTERM, in seconds.")
    ] = 30.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", help="Maximum number of tokens per completion; default: what fits in the context."
        ),
    ] = None,
    max_body: Annotated[str, typer.Option("--max-body", help="Maximum size of a request body, e.g. 2MB.")] = "2MiB",
    max_prompt: Annotated[
        int | None,
        typer.Option(
            "--max-prompt", help="Maximum number of characters per prompt; default: 8 per token of the context."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help="Require this API key; repeatable. Other users of the machine can see it in the process list.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="Require one of the API keys in this file (one per line).")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", help="Allow requests from web pages of this origin (CORS); repeatable."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="Accept this host name in requests, in addition to localhost; repeatable."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Model name in the API; default: the name of its directory.")
    ] = None,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Log prompts and completions; by default they are not logged.")
    ] = False,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--no-exact",
            help="Batch-invariant results (the same bits in any batch), or faster; default: exact on a CPU only.",
        ),
    ] = None,
    *,
    options: ModelOptions,
    speculation: SpeculationOptions,
    json: Json = False,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API until SIGTERM or Ctrl-C.

    The API supports streaming, logprobs, several completions per request, seeds and, for a nested checkpoint,
    `precision`. `/` is a playground, `/metrics` has Prometheus metrics, and `/openapi.json` describes the API. Logs go
    to stderr, one JSON object per line. API keys can also be set in the environment: CRELLE_API_KEYS, separated by
    commas. The exit code is 1 if the engine stopped after a fault.

    **Examples**

    `crelle serve out/smollm2-4bit --kv 4`

    `crelle serve out/smollm2-4bit --host 0.0.0.0 --api-key-file keys.txt --memory 4GB --queue-limit 64`
    """
    from crelle.engine.async_engine import AsyncEngine
    from crelle.engine.compile_ahead import prompt_sizes
    from crelle.engine.engine import Engine
    from crelle.engine.memory.plan import parse_bytes
    from crelle.errors import UnsupportedError

    try:
        from crelle.server import logs
        from crelle.server.app import reserve
        from crelle.server.run import serve
        from crelle.server.settings import Keys, Settings
    except ModuleNotFoundError as e:
        if (missing := (e.name or "").split(".")[0]) not in ("aiohttp", "msgspec", "prometheus_client"):
            raise
        raise UnsupportedError(f"crelle serve needs {missing}: pip install 'crelle[server]'") from e

    settings = Settings(
        host=host,
        port=port,
        keys=Keys.read(api_key_file, *(api_key or ())),
        origins=tuple(allow_origin or ()),
        hosts=tuple(allow_host or ()),
        max_body=parse_bytes(max_body),
        max_prompt=max_prompt,
        max_tokens=max_tokens,
        timeout=timeout,
        grace=grace,
        log_prompts=log_prompts,
    )
    use_threads(options.threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one sequence at a time: a thread pool would be idle
    sock = reserve(settings)  # report a port in use before loading the model
    try:
        with err.status(f"loading {model}"):
            llm = options.load(model, speculation, memory)
            limits = {"memory": memory, "max_batch": max_batch, "budget": budget, "queue_limit": queue_limit}
            engine = Engine(llm, batch_invariant=exact, **limits)  # type: ignore[arg-type]
        options.compile(llm, model, prompt_sizes(engine.plan.budget), engine)
    except BaseException:
        sock.close()
        raise
    logs.set_up()

    def on_start(server: "Server") -> None:
        facts = _facts(server)
        if json:
            print_json(facts)
        else:
            for line in _banner(server, facts):
                print(printable(line), flush=True)

    if serve(AsyncEngine(engine), settings, name=name, sock=sock, on_start=on_start) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # without a CUDA context torch's own clean-up could hang


def _facts(server: "Server") -> dict[str, Any]:
    from crelle.engine.memory.experts import offload_of
    from crelle.formats.storage.checkpoint import Checkpoint

    state = server.state
    llm, plan, weights = state.llm, state.engine.plan, state.llm.weights
    return {
        "address": server.address,
        "model": state.info.name,
        "scheme": weights.scheme if isinstance(weights, Checkpoint) else "not quantized by Crelle",
        "precisions": list(llm.precisions),
        "device": str(llm.model.device),
        "kv": str(state.engine.kv),
        "exact": state.engine.runner.batch_invariant,
        "speculation": str(state.engine.speculator),
        "speculation_reason": state.engine.speculation_reason,
        "pages": plan.pages,
        "cached_tokens": plan.tokens,
        "bytes": {"total": plan.total, "weights": plan.weights, "working": plan.working, "cache": plan.cache},
        "memory": plan.reason,
        "experts": None if (offload := offload_of(llm.model)) is None else str(offload),
        "context": plan.context,
        "longest": state.room,
        "max_batch": plan.max_batch,
        "budget": plan.budget,
        "queue_limit": state.engine.queue_limit,
        "keys": len(state.settings.keys.digests),
    }


def _banner(server: "Server", facts: dict[str, Any]) -> list[str]:
    from crelle.engine.memory.plan import show_bytes
    from crelle.version import __version__

    state = server.state
    settings, bits, plan = state.settings, facts["precisions"], state.engine.plan
    choice = f", {', '.join(map(str, bits))} bits, chosen per request" if bits else ""
    keys = (
        f"required ({facts['keys']} key{'s' * (facts['keys'] > 1)})"
        if facts["keys"]
        else "none (anyone who can connect can use this server)"
    )
    rows = {
        "model": facts["model"],
        "weights": facts["scheme"] + choice,
        "memory": f"{show_bytes(plan.total)}: {plan.reason}",
        "": plan.parts,
        "experts": facts["experts"],
        "limits": f"{plan.max_batch} concurrent sequences (--max-batch), {plan.budget} tokens per step (--budget), "
        f"{facts['queue_limit']} waiting requests (--queue-limit), {settings.timeout:g} s per request (--timeout)",
        "guesses": f"{facts['speculation']} ({facts['speculation_reason']}; --speculate to change)",
        "API key": keys,
        "address": f"{server.address}/v1 (API), {server.address} (playground)",
    }
    lines = [
        f"crelle {__version__} server",
        *(f"  {name:<8} {said}" for name, said in rows.items() if said is not None),
    ]
    if state.room < plan.context:
        lines.append(f"  The KV cache limits sequences to {state.room} tokens; the model's context is {plan.context}.")
    if not settings.loopback and not settings.keys:
        lines.append("  Other machines can reach this address, and no API key is required: see --api-key-file.")
    return [*lines, "  Press Ctrl-C or send SIGTERM to stop."]
