"""What the server does with a request beside the model, in two trees by turns: read, check, build, write.

    python bench/serving/server_requests.py OLD NEW OUT.json [--bursts 40] [--seconds 2] [--loads 15]

OLD and NEW are checkouts; CRELLE_CORE names the C++ core that both use. One process of each tree stays loaded; while
one works, the other waits. Times are processor time, for machines that others use too. Then a server of each tree with
a tiny random model gets loads of the same clients by turns: processor time of the server's process for each answer.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

CLIENTS, TOKENS, PROMPT = 4, 8, 40  # of a load: clients, tokens of an answer, words of a prompt


def worker() -> None:
    """Answer each line, the name of a measurement, with the microseconds that one of its kind took."""
    from crelle.engine.requests.output import Completion, Event, Output, TokenLogprob
    from crelle.engine.stats import Stats
    from crelle.server.errors import ApiError
    from crelle.server.metrics import Metrics
    from crelle.server.requests import RequestParser
    from crelle.server.responses import ResponseBuilder
    from crelle.server.schema.schemas import ModelInfo
    from crelle.server.schema.strict_json import encode, parse

    class Tokens:
        """Knows what tokens stand for, without a tokenizer."""

        def raw(self, token: int) -> bytes:
            return b" token%d" % token

        def text(self, token: int) -> str:
            return f" token{token}"

    parser = RequestParser(ModelInfo("m", 8192, 50_000, (), 65_536, 8192, 16, 64))
    words = "The quick brown fox jumps over the lazy dog. " * 8
    roles = ("user", "assistant")
    turns = [{"role": "system", "content": "You are brief."}]
    turns += [{"role": roles[i % 2], "content": words} for i in range(9)]
    asked = {"model": "m", "max_tokens": 64, "temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["\n\n", "###"]}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    bodies = {
        "a completion": {"prompt": words, **asked},
        "a chat of 1 message": {"messages": [{"role": "user", "content": words}], **asked, **streamed},
        "a chat of 10 messages": {"messages": turns, **asked},
        "8000 token ids": {"prompt": [i * 7919 % 50_000 for i in range(8000)], **asked},
        "a wrong value": {"prompt": words, **asked, "n": 0},
    }

    def reads(body: bytes, chat: bool) -> Callable[[], Any]:
        take = parser.chat if chat else parser.completion

        def work() -> None:
            try:
                take(parse(body))
            except ApiError as e:
                encode(e.body)

        return work

    def answers(chat: bool, stream: bool, logprobs: int | None) -> Callable[[], Any]:
        body: dict[str, Any] = {"messages": turns} if chat else {"prompt": words}
        given = {"logprobs": logprobs is not None, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}
        params = (parser.chat if chat else parser.completion)({**body, **asked, **given, "stream": stream})
        top = tuple((i, -1.5 - i) for i in range(logprobs or 0))
        told = None if logprobs is None else tuple(TokenLogprob(i, -0.5, top) for i in range(64))
        output = Output(0, Completion(words[:256], list(range(64)), "length", 90, 0.1, 50.0), told)
        events = [Event(0, " word", i, told[i] if told else None) for i in range(64)] + [Event(0, output=output)]

        def work() -> None:
            builder = ResponseBuilder(params, 1, "m", Tokens())
            if not stream:
                encode(builder.whole([output]))
                return
            builder.opening()
            for event in events:
                builder.chunk(0, event)
            builder.closing([output])

        return work

    work = {f"read {name}": reads(json.dumps(body).encode(), "messages" in body) for name, body in bodies.items()}
    for kind, chat in (("chat", True), ("completion", False)):
        work[f"write a whole {kind} of 64 tokens"] = answers(chat, False, None)
        work[f"write a stream of 64 tokens, {kind}"] = answers(chat, True, None)
        work[f"write a whole {kind} with 5 logprobs"] = answers(chat, False, 5)
        work[f"write a stream with 5 logprobs, {kind}"] = answers(chat, True, 5)
    metrics, stats = Metrics(), Stats(*range(len(fields(Stats))))
    page = getattr(metrics, "page", None) or getattr(metrics, "text")  # noqa: B009
    done = Output(0, Completion("", [1, 2], "length", 90, 0.1, 50.0))

    def count() -> None:
        metrics.answered("/v1/completions", 200)
        metrics.finished(done)

    count()
    work["count an answer"] = count
    work["write the page of metrics"] = lambda: page(stats, 256, True)
    print(json.dumps(list(work)), flush=True)
    for line in sys.stdin:
        run, times = work[line.strip()], 0
        begun = time.process_time()
        while (used := time.process_time() - begun) < 0.02 or times < 5:
            run()
            times += 1
        print(1e6 * used / times, flush=True)


def by_turns(trees: dict[str, Any], bursts: int, measure: Callable[[Any], Any]) -> dict[str, list[Any]]:
    """Measure each tree so often; who begins changes each time. The first turn warms up and does not count."""
    found: dict[str, list[Any]] = {label: [] for label in trees}
    for turn in range(bursts + 1):
        for label in list(trees) if turn % 2 == 0 else list(trees)[::-1]:
            value = measure(trees[label])
            if turn:
                found[label].append(value)
    return found


def compared(found: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [new / old for old, new in zip(found["old"], found["new"], strict=True)]
    first, _, third = quantiles(ratios, n=4)
    middle = {label: median(values) for label, values in found.items()}
    return {"median": middle, "new_over_old": median(ratios), "quartiles": [first, third]}


def start(tree: Path, *command: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src"), "OMP_WAIT_POLICY": "PASSIVE"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen([sys.executable, *command], env=env, **pipes)


def ask(process: "subprocess.Popen[str]", name: str) -> float:
    assert process.stdin
    assert process.stdout
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(server: tuple["subprocess.Popen[str]", str], chat: bool, seconds: float) -> tuple[float, float]:
    """Return processor milliseconds of the server for each answer, and answers a second."""
    from crelle.bench.load.http_load import run_closed_loop
    from crelle.bench.load.trace import random_words

    process, url = server
    before = processor_seconds(process.pid)
    prompts = [random_words(PROMPT, i) for i in range(64)]
    options: Any = {"chat": chat, "extra": {"ignore_eos": True}}
    report = run_closed_loop(url, clients=CLIENTS, seconds=seconds, prompts=prompts, max_tokens=TOKENS, **options)
    assert report.failures == 0, report.errors
    return 1e3 * (processor_seconds(process.pid) - before) / report.requests, report.requests_per_second


def serve(tree: Path, model: Path) -> tuple["subprocess.Popen[str]", str]:
    process = start(tree, "-m", "crelle.cli.main", "serve", str(model), "--port", "0", "--json", "--threads", "1")
    assert process.stdout
    said = ""
    while not said.endswith("}\n"):
        said += (line := process.stdout.readline())
        assert line, "the server ended"
    found = re.search(r"http://[\d.:]+", said)
    assert found
    return process, found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bursts", type=int, default=40, help="of each kind of request, 20 ms each")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one load")
    parser.add_argument("--loads", type=int, default=15, help="of each server and kind")
    args = parser.parse_args()
    tests = args.new.resolve() / "tests"
    sys.path[:0] = [str(args.new.resolve() / "src"), str(tests), str(tests / "support")]
    from conftest import write_tiny_model

    from crelle.bench.environment import write_result

    rows: list[dict[str, Any]] = []

    def add(name: str, unit: str, found: dict[str, list[float]]) -> None:
        rows.append({"name": name, "unit": unit, **compared(found), "all": found})
        row = rows[-1]
        low, high = row["quartiles"]
        print(
            f"{name}: {row['median']} {unit}; new / old {row['new_over_old']:.3f} ({low:.3f} – {high:.3f})", flush=True
        )

    trees = {"old": start(args.old, __file__, "worker"), "new": start(args.new, __file__, "worker")}
    names = {label: json.loads(process.stdout.readline()) for label, process in trees.items() if process.stdout}
    assert all(a == b for a, b in pairwise(names.values()))
    for name in names["new"]:
        add(name, "us", by_turns(trees, args.bursts, lambda process, name=name: ask(process, name)))
    for process in trees.values():
        process.kill()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny", max_position_embeddings=2048)
        servers = {"old": serve(args.old, model), "new": serve(args.new, model)}
        try:
            for chat in (True, False):
                found = by_turns(servers, args.loads, lambda server, chat=chat: load(server, chat, args.seconds))
                what = f"{CLIENTS} clients, streams of {TOKENS} tokens, {'chats' if chat else 'completions'}"
                add(f"server: {what}", "ms of processor", {k: [v[0] for v in values] for k, values in found.items()})
                add(f"server: {what}", "answers/s", {k: [v[1] for v in values] for k, values in found.items()})
        finally:
            for process, _ in servers.values():
                process.kill()
    command = f"python bench/serving/server_requests.py OLD NEW {args.out.name} --bursts {args.bursts}"
    command += f" --seconds {args.seconds:g} --loads {args.loads}"
    write_result(args.out, {"command": command, "rows": rows})


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        worker()
    else:
        main()
