"""crelle serve: answer many clients over HTTP, in OpenAI's protocol."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crelle.cli.common.console import Json, Model, err, print_json, use_threads
from crelle.cli.common.option_groups import ModelOptions, model_options
from crelle.printable import printable

if TYPE_CHECKING:
    from crelle.server.app import Server

NAME = "serve"


@model_options
def run(
    model: Model,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0: one that is free.")] = 8000,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="For weights, working space and cache together, like 24GB; default: 90% of the free memory of a GPU, "
            "or a cache of at most a quarter of a CPU's.",
        ),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option("--max-batch", help="Sequences that run at once; default: what the memory holds.")
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option("--budget", help="Tokens of a step, prompts included; default: 512 to 2048, as memory allows."),
    ] = None,
    queue_limit: Annotated[int, typer.Option("--queue-limit", help="Prompts that may wait; one more gets 429.")] = 256,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that a whole request may take.")] = 600.0,
    grace: Annotated[float, typer.Option("--grace", help="Seconds to finish what runs after SIGTERM.")] = 30.0,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tokens of an answer at most; default: what the context holds.")
    ] = None,
    max_body: Annotated[str, typer.Option("--max-body", help="Size of a request at most, like 2MB.")] = "2MiB",
    max_prompt: Annotated[
        int | None, typer.Option("--max-prompt", help="Characters of a prompt at most; default: 8 a token of context.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", help="Ask clients for this key; repeatable; others can see it.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="Ask for one of the keys in this file, one a line.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option("--allow-origin", help="Let web pages of this origin call (CORS); repeatable.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="A name under which clients call the server, beside localhost; repeatable."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What clients call the model; default: as its directory.")
    ] = None,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts and answers into the log; they are left out otherwise.")
    ] = False,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--no-exact", help="Batch-invariant (same bits in any batch), or faster; default: exact on a CPU."
        ),
    ] = None,
    *,
    options: ModelOptions,
    json: Json = False,
) -> None:
    """Serve a model over HTTP as OpenAI does, until SIGTERM or Ctrl-C. Exit code 1: the engine stopped after a fault.

    Clients may stream, ask for logprobs, several completions, seeds and, of a nested checkpoint, `precision`. The
    playground is at `/`, metrics for Prometheus at `/metrics`, what is understood at `/openapi.json`. Logs go to
    stderr, one JSON object a line. Keys may also stand in the environment: CRELLE_API_KEYS, with commas between.

    **Examples**

    `crelle serve out/smollm2-4bit --kv 4`

    `crelle serve out/smollm2-4bit --host 0.0.0.0 --api-key-file keys.txt --memory 4GB --queue-limit 64`
    """
    from crelle.engine.async_engine import AsyncEngine
    from crelle.engine.engine import Engine
    from crelle.engine.memory import parse_bytes
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
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: its pool of threads would be idle
    sock = reserve(settings)  # a port that is taken is said before the model is loaded
    try:
        with err.status(f"loading {model}"):
            llm = options.load(model)
            limits = {"memory": memory, "max_batch": max_batch, "budget": budget, "queue_limit": queue_limit}
            engine = Engine(llm, batch_invariant=exact, **limits)  # type: ignore[arg-type]
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
        os._exit(1)  # at once: without a CUDA context torch's own clean-up could wait for ever


def _facts(server: "Server") -> dict[str, Any]:
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
        "pages": plan.pages,
        "cached_tokens": plan.tokens,
        "bytes": {"total": plan.total, "weights": plan.weights, "working": plan.working, "cache": plan.cache},
        "memory": plan.reason,
        "context": plan.context,
        "longest": state.room,
        "max_batch": plan.max_batch,
        "budget": plan.budget,
        "queue_limit": state.engine.queue_limit,
        "keys": len(state.settings.keys.digests),
    }


def _banner(server: "Server", facts: dict[str, Any]) -> list[str]:
    from crelle.engine.memory import show_bytes
    from crelle.version import __version__

    state = server.state
    settings, bits, plan = state.settings, facts["precisions"], state.engine.plan
    choice = f", at {', '.join(map(str, bits))} bits as each request asks" if bits else ""
    keys = (
        f"{facts['keys']} API key{'s' * (facts['keys'] > 1)}"
        if facts["keys"]
        else "none: whoever reaches it may use it"
    )
    rows = {
        "model": facts["model"],
        "weights": facts["scheme"] + choice,
        "memory": f"{show_bytes(plan.total)}: {plan.reason}",
        "": plan.parts,
        "limits": f"{plan.max_batch} sequences at once, {plan.budget} tokens a step (--max-batch, --budget to change), "
        f"{facts['queue_limit']} requests may wait, {settings.timeout:g} s each",
        "keys": keys,
        "address": f"{server.address}/v1 for clients, {server.address} to play",
    }
    lines = [f"crelle {__version__} serves", *(f"  {name:<8} {said}" for name, said in rows.items())]
    if state.room < plan.context:
        lines.append(f"  the cache holds sequences of {state.room} tokens, fewer than the model's {plan.context}")
    if not settings.loopback and not settings.keys:
        lines.append("  other machines can reach this address, and no key is asked for: see --api-key-file")
    return [*lines, "  Ctrl-C or SIGTERM ends it"]
