"""Many clients at once, for a minute or for half an hour: every request is answered, memory stays, answers are right.

    python bench/serving/serve_soak.py OUT.json [--clients 64] [--seconds 60] [--model DIR] [--kv 4]
    python bench/serving/serve_soak.py OUT.json --minutes 30 --model DIR --kv 16,8,4 --faults   # what `make soak` runs
    python bench/serving/serve_soak.py OUT.json --dies 200                                          # and a restart

Without --model: SmolLM2-135M. A model that is not quantized is made one in a temporary folder, by --scheme. The server
is a process of its own, `crelle serve`, whose pages and resident memory are read every second; several --kv take turns,
each with a server of its own, which guesses tokens as it does by default. Half the requests are greedy, half sampled;
half streamed; a fifth ask for an answer of a given form, which must match it; some ask for several answers or, of a
nested checkpoint, for another precision; some clients leave in the middle of a stream, some vanish without a
word. With --faults one step in a hundred raises in the runner, an Exception or a BaseException: whoever is in that step
gets an error, nobody else, and nobody waits.

With --dies N the CUDA context is lost at step N (an injected error of the runner): every client gets an error, the
server ends by itself with a code that is not 0, and one that is started again serves the same traffic for --seconds.

Every greedy answer that was read to its end is compared with LLM.generate of the list of prompts, which has the
engine's order of sums. Memory is the median of the last third of the time behind a warm-up over that of the first.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from crelle import LLM, Sampling, quantize
from crelle.bench.environment import environment
from crelle.engine.memory.plan import plan
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights

PROMPTS = [
    "Python is a programming language that",
    "The three laws of robotics are",
    "Once upon a time there was a fox who",
    "def fibonacci(n):",
    "The capital of France is",
    "A recipe for bread: take",
    "In 1820 August Leopold Crelle",
    "Dear Sir or Madam,",
]
TOKENS = (8, 16, 32)
PAGES = 400  # of the cache: few, so that all of them have been touched after the warm-up
LEAVES, VANISHES = 0.1, 0.05  # of the clients: in the middle of a stream; without reading anything
FAULTS = 0.01  # of the steps, with --faults
FORMED = 0.2  # of the requests: answers that must match
CHOICES = ["yes", "no", "perhaps"]
REGEX = r"[a-c]{3}-[0-9]{2}"  # \d is any of Unicode's digits, of which libraries know different ones
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
FORMS: tuple[tuple[dict[str, Any], str], ...] = (  # what is asked for, and a regular expression of all such answers
    ({"guided_choice": CHOICES}, "|".join(CHOICES)),
    ({"guided_regex": REGEX}, REGEX),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
        r'\{\s*"n"\s*:\s*\d\s*,\s*"ok"\s*:\s*(true|false)\s*\}\s*',
    ),
)
WARM_UP = 0.3  # of the time: memory is compared from here on
LONG = 300  # seconds: from here on memory must be flat within 3%, in shorter runs within 6%
Key = tuple[str, int, int | None]  # prompt, tokens, precision


@dataclass
class Log:
    """What clients saw."""

    asked: int = 0
    answers: int = 0  # whole ones
    greedy: int = 0  # of these, which were compared
    formed: int = 0  # of these, with a form that they were checked against
    left: int = 0  # streams that their clients left
    vanished: int = 0  # clients that hung up at once
    refused: int = 0  # 429: asked again later
    faults: int = 0  # answers that told of an error of the server's, as they must where faults are injected
    gone: int = 0  # connections refused after the server had died
    unanswered: list[str] = field(default_factory=list)
    different: list[Any] = field(default_factory=list)
    malformed: list[Any] = field(default_factory=list)
    pages_used_at_the_end: int = -1


# Clients --------------------------------------------------------------------------------------------------------------


class ServerFaultError(Exception):
    """The server said that it failed."""


async def client(
    session: aiohttp.ClientSession, url: str, end: float, seed: int, want: dict[Key, str], log: Log, dies: bool = False
) -> None:
    """Ask one question after the other; of a server that dies, until the first error."""
    rng, bits = random.Random(seed), sorted({key[2] for key in want}, key=str)
    while time.monotonic() < end:
        prompt, tokens, precision, greedy = (
            rng.choice(PROMPTS),
            rng.choice(TOKENS),
            rng.choice(bits),
            rng.random() < 0.5,
        )
        stream, leaves, n = rng.random() < 0.5, rng.random() < LEAVES, rng.choice((1, 1, 1, 2))
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0 if greedy else 0.8, "n": n, "stream": stream}
        body |= {} if precision is None else {"precision": precision}
        form = rng.choice(FORMS) if rng.random() < FORMED else None
        if form is not None:
            body |= form[0] | {"max_tokens": 64, "presence_penalty": 0.1}
        log.asked += 1
        if rng.random() < VANISHES:
            await vanish(url, body, rng.random() * 0.2)
            log.vanished += 1
            continue
        try:
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                if answer.status == 429:
                    log.refused += 1
                    await asyncio.sleep(float(answer.headers["Retry-After"]))
                    continue
                if answer.status in ((500, 503) if dies else (500,)) and "error" in await answer.json():
                    raise ServerFaultError
                if answer.status != 200:
                    log.unanswered.append(f"{answer.status}: {await answer.text()}")
                    continue
                texts = await streamed(answer, n, leaves) if stream else await whole(answer)
        except ServerFaultError:
            log.faults += 1
            if dies:
                return
            continue
        except aiohttp.ClientConnectorError as e:
            if dies:
                log.gone += 1
                return
            log.unanswered.append(f"{type(e).__name__}: {e}")
            continue
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as e:
            log.unanswered.append(f"{type(e).__name__}: {e}")
            continue
        if texts is None:
            log.left += 1
            continue
        log.answers += 1
        if form is not None:
            ended = [text for text, reason in texts if reason == "stop"]
            log.formed += len(ended)
            log.malformed += [[form[0], text] for text in ended if re.fullmatch(form[1], text) is None]
        elif greedy:
            log.greedy += 1
            if [text for text, _ in texts] != [want[prompt, tokens, precision]] * n:
                log.different.append([prompt, tokens, precision, texts])


async def whole(answer: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    """Return texts and why they ended."""
    return [(choice["text"], choice["finish_reason"]) for choice in (await answer.json())["choices"]]


async def streamed(answer: aiohttp.ClientResponse, n: int, leaves: bool) -> list[tuple[str, str]] | None:
    """Read a stream to its end, as `whole`; None: left in the middle."""
    texts, reasons, done = [""] * n, [""] * n, False
    async for line in answer.content:
        if line.startswith(b"data: {"):
            found = json.loads(line[6:])
            if "error" in found:
                raise ServerFaultError
            choice = found["choices"][0]
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
            if leaves:
                answer.close()
                return None
        done |= line.startswith(b"data: [DONE]")
    if not done:
        raise ValueError("the stream ended too early")
    return list(zip(texts, reasons, strict=True))


async def vanish(url: str, body: dict[str, Any], after: float) -> None:
    """Ask, wait a little, and hang up without a word."""
    at, data = urlsplit(url), json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\n"
    try:
        _, writer = await asyncio.open_connection(at.hostname, at.port)
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await asyncio.sleep(after)
        writer.transport.abort()
    except OSError:
        pass


async def watch(session: aiohttp.ClientSession, url: str, pid: int, end: float, seen: list[dict[str, Any]]) -> None:
    begun = time.monotonic()
    while time.monotonic() < end:
        async with session.get(f"{url}/v1/status") as answer:
            status = await answer.json()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        rss = pages * os.sysconf("SC_PAGE_SIZE")
        seen.append({"at": time.monotonic() - begun, "rss": rss, **status})
        await asyncio.sleep(1)


async def traffic(
    url: str, pid: int, clients: int, seconds: float, want: dict[Key, str], log: Log
) -> list[dict[str, Any]]:
    """Let clients work for some time; return what the server said of itself every second."""
    seen: list[dict[str, Any]] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        end = time.monotonic() + seconds
        work = [client(session, url, end, i, want, log) for i in range(clients)]
        await asyncio.gather(watch(session, url, pid, end, seen), *work)
        for _ in range(300):  # until those that were left are gone
            async with session.get(f"{url}/v1/status") as answer:
                last = await answer.json()
            if not last["running"] and not last["waiting"]:
                break
            await asyncio.sleep(0.1)
        log.pages_used_at_the_end = last["pages_used"]
    return seen


async def traffic_until_death(url: str, clients: int, seconds: float, want: dict[Key, str], log: Log) -> None:
    """Let clients work until the server dies."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        end = time.monotonic() + seconds
        await asyncio.gather(*(client(session, url, end, i, want, log, dies=True) for i in range(clients)))


# The server -----------------------------------------------------------------------------------------------------------


class Panic(BaseException):
    """A fault that is not an Exception, like a panic in Rust."""


def faulty_server(rate: float, dies: int, arguments: list[str]) -> None:
    """Be `crelle`, but let some steps raise, and all from step `dies` on (0: never); in a process of its own."""
    from crelle.cli.main import main as crelle
    from crelle.engine.faults import FAILED_STEPS
    from crelle.engine.model_runner import ModelRunner

    run, rng = ModelRunner.run, random.Random(0)
    steps = in_a_row = 0

    def sometimes(self: ModelRunner, step: Any) -> Any:
        nonlocal steps, in_a_row
        steps += 1
        if dies and steps >= dies:
            raise RuntimeError("CUDA error: unspecified launch failure\ninjected by the soak test")
        if rng.random() < rate and in_a_row + 1 < FAILED_STEPS:  # so many in a row would end the server
            in_a_row += 1
            raise rng.choice([RuntimeError, MemoryError, Panic])("injected by the soak test")
        in_a_row = 0
        return run(self, step)

    ModelRunner.run = sometimes  # type: ignore[method-assign]
    sys.argv = ["crelle", *arguments]
    crelle()


@contextmanager
def server(
    model: Path, kv: str, memory: int, faults: bool, log: Path, dies: int = 0
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server; yield its address and its process, which is ended with SIGTERM unless it has died (`dies`)."""
    arguments = ["serve", str(model), "--kv", kv, "--port", "0", "--memory", str(memory), "--device", "cpu"]
    start = ["-m", "crelle.cli.main"]
    if faults or dies:
        start = [str(Path(__file__).resolve()), "--faulty-server", str(FAULTS if faults else 0.0), str(dies)]
    command = [sys.executable, *start, *arguments]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout
            said = ""
            while not (found := re.search(r"http://[\d.:]+", said)):
                line = process.stdout.readline()
                assert line, log.read_text()
                said += line
            yield found[0], process
            if not dies:
                process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()


# The whole ------------------------------------------------------------------------------------------------------------


def expected(llm: LLM) -> dict[Key, str]:
    """Return what LLM.generate of a list says to the prompts, at every precision."""
    want: dict[Key, str] = {}
    asked = [(prompt, n) for prompt in PROMPTS for n in TOKENS]
    for bits in llm.precisions or (None,):
        all_done = llm.generate([prompt for prompt, _ in asked], [Sampling(max_tokens=n) for _, n in asked], bits=bits)
        want |= {(prompt, n, bits): done.text for (prompt, n), done in zip(asked, all_done, strict=True)}
    finest = max(llm.precisions, default=None)
    return want | {(prompt, n, None): want[prompt, n, finest] for prompt in PROMPTS for n in TOKENS}


def prepared(model: Path, kv: str) -> tuple[dict[Key, str], int]:
    """Return what the answers must be, and a memory budget with room for PAGES."""
    llm = LLM.load(model, device="cpu", kv=kv)
    want, models = expected(llm), [llm.at(bits) for bits in llm.precisions] or [llm.model]
    return want, plan(models, llm.kv, memory=None, pages=PAGES, max_batch=32, budget=512).total


def soak(model: Path, kv: str, clients: int, seconds: float, faults: bool, folder: Path) -> dict[str, Any]:
    """Soak a checkpoint with one kind of cache; return the figures, with `wrong`: what must not be, in words."""
    log, log_file = Log(), folder / f"log-{kv}"
    want, memory = prepared(model, kv)
    with server(model, kv, memory, faults, log_file) as (url, process):
        seen = asyncio.run(traffic(url, process.pid, clients, seconds, want, log))
    warm = [s["rss"] for s in seen if s["at"] >= WARM_UP * seconds] or [seen[-1]["rss"]]
    third = max(1, len(warm) // 3)
    growth = median(warm[-third:]) / median(warm[:third]) - 1
    said = log_file.read_text()
    row = {
        "kv": kv,
        "clients": clients,
        "seconds": seconds,
        "faults_injected_in_steps": FAULTS if faults else 0,
        **asdict(log),
        "exit_code": process.returncode,
        "tracebacks_in_the_log": said.count("Traceback"),
        "rss_mb": {"least": min(warm) / 1e6, "most": max(warm) / 1e6, "last": warm[-1] / 1e6},
        "rss_growth": growth,
        "tokens_per_second": sum(s["tokens_per_second"] for s in seen) / len(seen),
        "pages": seen[-1]["pages"],
        "most_pages_used": max(s["pages_used"] for s in seen),
    }
    limit = 0.03 if seconds >= LONG else 0.06
    checks = {
        f"{len(log.unanswered)} requests were not answered": log.unanswered,
        f"{len(log.different)} answers are not those of LLM.generate": log.different,
        f"{len(log.malformed)} answers do not have the form that was asked for": log.malformed,
        f"{log.pages_used_at_the_end} pages are in use at the end": log.pages_used_at_the_end,
        f"the server ended with code {process.returncode}": process.returncode,
        "the server's log has tracebacks": row["tracebacks_in_the_log"],
        f"memory grew by {growth:.1%}, more than {limit:.0%}": growth > limit,
        "nothing was answered": not log.answers,
        f"{log.faults} answers tell of faults that nobody injected": log.faults and not faults,
        "no fault was injected": faults and not log.faults,
    }
    return {**row, "wrong": [what for what, found in checks.items() if found]}


def die_and_restart(
    model: Path, kv: str, clients: int, seconds: float, dies: int, folder: Path, patience: float = 600
) -> dict[str, Any]:
    """Let the runner die for good under traffic, then start the server again; return as `soak` does."""
    log, again, files = Log(), Log(), [folder / f"log-{kv}-dies", folder / f"log-{kv}-again"]
    want, memory = prepared(model, kv)
    with server(model, kv, memory, False, files[0], dies) as (url, dead):
        asyncio.run(traffic_until_death(url, clients, patience, want, log))
    with server(model, kv, memory, False, files[1]) as (url, process):
        asyncio.run(traffic(url, process.pid, clients, seconds, want, again))
    said = files[0].read_text()
    row = {"kv": kv, "clients": clients, "dies_at_step": dies, **asdict(log), "exit_code": dead.returncode}
    row |= {"restarted": {"seconds": seconds, **asdict(again), "exit_code": process.returncode}}
    both = [*log.unanswered, *again.unanswered]
    checks = {
        f"{len(both)} requests were not answered": both,
        "an answer is not that of LLM.generate": [*log.different, *again.different],
        f"the server that died ended with code {dead.returncode}, not 1": dead.returncode != 1,
        "no client was told of the death": not log.faults,
        "the log does not report why the engine died": "the CUDA context is lost" not in said,
        "the log has tracebacks": "Traceback" in said,
        "nothing was answered before": not log.answers,
        "the server that was started again answered nothing": not again.answers,
        f"it failed {again.faults} times": again.faults,
        f"it ended with code {process.returncode}": process.returncode,
    }
    return {**row, "wrong": [what for what, found in checks.items() if found]}


def checkpoint(model: Path | None, scheme: str, folder: Path) -> tuple[Path, str]:
    """Return a quantized model and what it is: the one given, or one made of it."""
    if model is None:
        from crelle.eval.smollm2 import smollm2

        source, name = smollm2(), "SmolLM2-135M"
    else:
        if isinstance(weights := open_weights(model), Checkpoint):
            return model, f"{model.name} {weights.scheme}"
        source, name = model, model.name
    quantize(source, folder / "model", scheme, head="rtn:bits=4,group=8", device="cpu")
    return folder / "model", f"{name} {scheme}, 4-bit head"


def main() -> None:
    if sys.argv[1:2] == ["--faulty-server"]:
        faulty_server(float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--minutes", type=float, help="instead of --seconds; shared by all --kv")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--scheme", default="rtn:bits=4,group=32", help="of a model that is not quantized")
    parser.add_argument("--kv", default="4", help="one, or several with commas between")
    parser.add_argument("--faults", action="store_true", help="let one step in a hundred raise")
    parser.add_argument("--dies", type=int, metavar="N", help="let the runner die for good at step N, then restart")
    args = parser.parse_args()
    caches = args.kv.split(",")
    seconds = args.seconds if args.minutes is None else 60 * args.minutes / len(caches)
    with tempfile.TemporaryDirectory(prefix="crelle-soak-") as folder:
        model, name = checkpoint(args.model, args.scheme, Path(folder))
        if args.dies:
            rows = [die_and_restart(model, kv, args.clients, seconds, args.dies, Path(folder)) for kv in caches]
        else:
            rows = [soak(model, kv, args.clients, seconds, args.faults, Path(folder)) for kv in caches]
    given = [Path(a).name if a.startswith(("/", "~")) else a for a in sys.argv[1:]]
    result = {
        **environment(),
        "command": f"python bench/serving/serve_soak.py {' '.join(given)}",
        "model": name,
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(rows, indent=2))
    if wrong := [f"kv {row['kv']}: {what}" for row in rows for what in row["wrong"]]:
        sys.exit("the soak failed: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
