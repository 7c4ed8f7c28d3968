"""Crelle as users run it: a checkpoint on disk, `crelle serve DIR --port P`, and many clients over HTTP.

    python tests/run_gpu.py --acceptance [--shape llama2-7b] [--layers N] [--scheme …] [--requests 5000] [--out FILE]
    python tests/acceptance/acceptance.py --device cpu --shape tiny --requests 60

    1  checkpoint    a real shape with random weights, written in its quantized form (acceptance_checkpoint.py)
    2  reference     the answers to some prompts; on a GPU by a process that has ended when the server starts
    3  serve         exactly as a user starts it; its banner goes into the result
    4  alone         the known prompts, one request at a time
    5  load          64 clients of the openai client: all kinds of acceptance_clients.py, prompts of 16 to 4000 tokens.
                     In the middle SIGTERM, while requests are under way: all of them must be answered, the server must
                     end with code 0, a second one answers the known prompts one at a time, and the load goes on
    6  end           /metrics: no page in use, no sequence failed; SIGTERM

What is compared. On a CPU, or with --exact, answers have the same bits in any batch: every answer to a known prompt,
alone and under load, streamed or not, must be the one of LLM.generate of the list. On a GPU bits depend on the batch
otherwise, so only answers to requests that were alone, on a server without anything in its prefix cache, are compared:
with those of an engine with the server's own defaults (what LLM.generate runs, with a cache of the same size) that is
given one prompt at a time.

Times are those that a client in Python sees. The exit status is 1 if any request failed or any check did.
"""

import argparse
import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from acceptance_clients import ANSWERS, KINDS, Crowd, Known, Outcome, known_prompts

START = 300  # seconds that a server may take to start
STOP = 60  # and to end after SIGTERM
CRELLE = [sys.executable, "-m", "crelle"]


# The server -----------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """`crelle serve` as a process."""

    process: subprocess.Popen[str]
    banner: list[str]
    seconds: float  # until it took requests

    @classmethod
    def start(cls, model: Path, port: int, options: Sequence[str], log: Path) -> "Server":
        begun = time.monotonic()
        with log.open("a") as errors:
            command = [*CRELLE, "serve", str(model), "--port", str(port), *options]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        banner: list[str] = []
        too_long = Timer(START, process.kill)  # its output ends then, and so does the loop
        too_long.start()
        try:
            while not (banner and "Ctrl-C" in banner[-1]):  # the last line
                if not (line := process.stdout.readline()):
                    process.kill()
                    raise SystemExit(f"crelle serve did not start:\n{''.join(banner)}\n{log.read_text()[-2000:]}")
                banner.append(line.rstrip())
        finally:
            too_long.cancel()
        return cls(process, banner, time.monotonic() - begun)

    def stop(self) -> None:
        """Send SIGTERM and wait; the server must end by itself, with code 0."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SystemExit(f"crelle serve did not end within {STOP} s of SIGTERM") from None
        if code:
            raise SystemExit(f"crelle serve ended with code {code} after SIGTERM")

    def kill(self) -> None:
        """End the process, if it runs, and its pipe."""
        self.process.kill()
        self.process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def metrics(url: str) -> dict[str, float]:
    """Return the metrics without labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return {m[1]: float(m[2]) for line in lines if (m := re.fullmatch(r"(\w+) (\S+)", line))}


# The reference --------------------------------------------------------------------------------------------------------


def reference(model: Path, file: Path, device: str, exact: bool) -> None:
    """Write the answers to the known prompts of a file into it."""
    from crelle import LLM, Sampling
    from crelle.engine.engine import Engine
    from crelle.engine.offline import generate_all

    known = [Known(**it) for it in json.loads(file.read_text())]
    llm = LLM.load(model, device=device)
    each = [
        Sampling(max_tokens=it.tokens)
        if it.seed is None
        else Sampling(max_tokens=it.tokens, temperature=0.8, seed=it.seed)
        for it in known
    ]
    prompts = [it.prompt for it in known]
    if llm.model.device.type == "cpu":
        texts = [done.text for done in llm.generate(prompts, each)]
    elif exact:
        texts = [done.text for done in generate_all(llm, prompts, each, batch_invariant=True)]
    else:
        engine, texts = Engine(llm), []
        for prompt, sampling in zip(prompts, each, strict=True):
            handle = engine.add(prompt, sampling)
            engine.run()
            if (output := handle.outputs[0]).error is not None:
                raise output.error
            texts.append(output.completion.text)
    answered = [asdict(it) | {"text": text} for it, text in zip(known, texts, strict=True)]
    file.write_text(json.dumps(answered))


# The run --------------------------------------------------------------------------------------------------------------


async def drive(args: argparse.Namespace, model: Path, known: list[Known], context: int) -> tuple[Crowd, list[Server]]:
    """Run steps 3 to 6."""
    port, log = free_port(), Path(args.folder) / "server.log"
    options = [*(["--exact"] if args.exact else []), *([] if args.device == "auto" else ["--device", args.device])]
    crowd = Crowd(f"http://127.0.0.1:{port}", model.name, known, context, args.exact or not args.gpu)
    servers = [Server.start(model, port, options, log)]

    async def restart() -> None:
        while len(crowd.outcomes) < len(known) + args.requests // 2:
            await asyncio.sleep(0.01)
        crowd.gate.clear()
        await asyncio.sleep(0.05)  # what was sent has arrived
        say(f"SIGTERM with {crowd.active} requests under way")
        await asyncio.to_thread(servers[-1].stop)
        servers.append(await asyncio.to_thread(Server.start, model, port, options, log))
        await crowd.alone()
        crowd.gate.set()

    try:
        say(f"serving after {servers[0].seconds:.1f} s:\n" + "\n".join(servers[0].banner))
        await crowd.alone()
        begun = time.monotonic()
        await crowd.run(args.requests, args.clients, args.seed, restart)
        say(f"{args.requests} requests in {time.monotonic() - begun:.1f} s, a restart included")
        found = metrics(crowd.url)
        wanted = {"crelle_kv_pages_used": 0, "crelle_texts_failed_total": 0, "crelle_ready": 1}
        for name, value in wanted.items():
            if found.get(name) != value:
                crowd.outcomes.append(Outcome("metrics", time.monotonic(), error=f"{name} is {found.get(name)}"))
        await asyncio.to_thread(servers[-1].stop)
    finally:
        for server in servers:
            server.kill()
    return crowd, servers


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(args: argparse.Namespace, crowd: Crowd, servers: list[Server], seconds: dict[str, float]) -> dict[str, Any]:
    """Return the result: totals, a row for each kind, and why requests failed."""
    from crelle.bench.environment import environment
    from crelle.bench.load.load_report import Percentiles

    def row(kind: str, some: list[Outcome]) -> dict[str, Any]:
        first = Percentiles.of([o.first for o in some if o.first is not None])
        answer = Percentiles.of([o.seconds for o in some])
        return {
            "kind": kind,
            "requests": len(some),
            "failures": sum(o.error is not None for o in some),
            "compared": sum(o.compared for o in some),
            "tokens": sum(o.tokens for o in some),
            "prompt_tokens": sum(o.prompt_tokens for o in some),
            "first_token_seconds": first and asdict(first),
            "answer_seconds": answer and asdict(answer),
        }

    load = [o for o in crowd.outcomes if o.kind in KINDS]
    spans = busy_seconds(load)
    everything = row("all under load", load)
    return {
        "shape": args.shape,
        "layers": args.layers,
        "scheme": args.scheme,
        "exact": crowd.exact,
        "clients": args.clients,
        "banner": servers[0].banner,
        "seconds": {**seconds, "load": spans, "starts": [s.seconds for s in servers]},
        "requests_per_second": len(load) / spans,
        "tokens_per_second": everything["tokens"] / spans,
        "prompt_tokens_per_second": everything["prompt_tokens"] / spans,
        "failures": sum(o.error is not None for o in crowd.outcomes),
        "rows": [row(k, [o for o in crowd.outcomes if o.kind == k]) for k in ("alone", *KINDS)] + [everything],
        "errors": dict(Counter(f"{o.kind}: {o.error}" for o in crowd.outcomes if o.error).most_common(20)),
        "environment": environment(),
    }


def busy_seconds(load: list[Outcome]) -> float:
    """Return how long requests were under way: without the restart."""
    edges = sorted([(o.begun, 1) for o in load] + [(o.begun + o.seconds, -1) for o in load])
    total, active, last = 0.0, 0, edges[0][0]
    for at, change in edges:
        total += (at - last) * (active > 0)
        active, last = active + change, at
    return total


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "kind", "requests", "failed", "compared", "tokens", "first token ms, p50 / p99", "answer s, p50 / p99"
    )
    for r in result["rows"]:
        first, answer = r["first_token_seconds"], r["answer_seconds"]
        table.add_row(
            *(str(r[name]) for name in ("kind", "requests", "failures", "compared", "tokens")),
            f"{1e3 * first['p50']:.1f} / {1e3 * first['p99']:.1f}" if first else "–",
            f"{answer['p50']:.2f} / {answer['p99']:.2f}" if answer else "–",
        )
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{result['clients']} clients: {result['requests_per_second']:.1f} requests/s, "
        f"{result['tokens_per_second']:.0f} tokens/s, {result['prompt_tokens_per_second']:.0f} prompt tokens/s, "
        f"{result['failures']} failures",
        highlight=False,
    )
    for error, times in result["errors"].items():
        console.print(f"{times} times: {error}", highlight=False, markup=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama2-7b", help="a name of crelle.bench.model_shapes, or tiny")
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--scheme", help="default: rtn:bits=4,group=128, of a tiny model group=64")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--exact", action="store_true", help="serve with --exact, and compare answers under load")
    parser.add_argument("--requests", type=int, default=5000, help="under load")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--known", type=int, default=32, help="prompts whose answers are compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="for the checkpoint and the log; default: a temporary one")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--reference", nargs=2, type=Path, metavar=("MODEL", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.reference:
        reference(*args.reference, args.device, args.exact)
        return 0
    from crelle.models.loader import choose_device

    args.gpu = choose_device(args.device).type == "cuda"
    args.scheme = args.scheme or f"rtn:bits=4,group={64 if args.shape == 'tiny' else 128}"
    temporary = None if args.folder else tempfile.mkdtemp(prefix="crelle-acceptance-")
    args.folder = args.folder or temporary
    try:
        result = accept(args)
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
    show(result)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(result["failures"] > 0)


def accept(args: argparse.Namespace) -> dict[str, Any]:
    """Make the checkpoint and the reference, then drive the server."""
    from acceptance_checkpoint import write_checkpoint

    model, begun, seconds = Path(args.folder) / f"{args.shape}-random", time.monotonic(), {}
    if not model.exists():
        write_checkpoint(model, args.shape, args.scheme, "cuda" if args.gpu else "cpu", args.layers)
    seconds["checkpoint"] = time.monotonic() - begun
    size = sum(f.stat().st_size for f in model.iterdir())
    say(f"{model.name}, {args.scheme}: {size / 1e9:.2f} GB written in {seconds['checkpoint']:.1f} s")
    context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    file, begun = Path(args.folder) / "known.json", time.monotonic()
    file.write_text(json.dumps([asdict(it) for it in known_prompts(args.known, context - max(ANSWERS))]))
    if args.gpu:
        command = [sys.executable, __file__, "--reference", str(model), str(file), "--device", args.device]
        subprocess.run([*command, *(["--exact"] if args.exact else [])], check=True)
    else:
        reference(model, file, args.device, args.exact)
    seconds["reference"] = time.monotonic() - begun
    known = [Known(**it) for it in json.loads(file.read_text())]
    say(f"{len(known)} known answers in {seconds['reference']:.1f} s")
    crowd, servers = asyncio.run(drive(args, model, known, context))
    return report(args, crowd, servers, seconds)


if __name__ == "__main__":
    raise SystemExit(main())
