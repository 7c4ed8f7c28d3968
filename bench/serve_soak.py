"""Many clients at once, for a minute: nobody fails, memory stays, greedy answers are those of LLM.generate.

    python bench/serve_soak.py OUT.json [--clients 64] [--seconds 60] [--model DIR] [--kv 4]

Without --model: SmolLM2-135M at 4 bits (rtn, groups of 64), made in a temporary folder. The server is a process of its
own, `crelle serve`, whose pages and resident memory are read every second. Half the requests are greedy, half sampled;
half streamed; some clients leave in the middle. Every greedy answer that was read to its end is compared with
LLM.generate of the list of prompts, which has the engine's order of sums. LLM.generate of one prompt runs as one fused
call whose last digits differ, and 4-bit codes of keys magnify that: how many answers are equal to it too is only told.
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
from pathlib import Path
from typing import Any

import aiohttp

from crelle import LLM, Sampling, quantize
from crelle.eval.machine import facts
from crelle.eval.smollm2 import smollm2

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
QUIT = 0.1  # of the streams: their client leaves in the middle
WARM_UP = 0.25  # of the time: memory is compared from here on


async def client(session: aiohttp.ClientSession, url: str, end: float, rng: random.Random, log: dict[str, Any]) -> None:
    while time.monotonic() < end:
        prompt, tokens, greedy = rng.choice(PROMPTS), rng.choice(TOKENS), rng.random() < 0.5
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0 if greedy else 0.8}
        stream, quits = rng.random() < 0.5, rng.random() < QUIT
        try:
            async with session.post(f"{url}/v1/completions", json={**body, "stream": stream}) as answer:
                if answer.status == 429:
                    log["refused"] += 1
                    await asyncio.sleep(float(answer.headers["Retry-After"]))
                    continue
                if answer.status != 200:
                    log["failures"].append(f"{answer.status}: {await answer.text()}")
                    continue
                text = await _streamed(answer, quits) if stream else (await answer.json())["choices"][0]["text"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as e:
            log["failures"].append(f"{type(e).__name__}: {e}")
            continue
        if text is None:
            log["left"] += 1
            continue
        log["answers"] += 1
        if greedy:
            log["greedy"] += 1
            log["as_one_prompt_alone"] += log["single"][prompt, tokens] == text
            if log["want"][prompt, tokens] != text:
                log["different"].append([prompt, tokens, text])


async def _streamed(answer: aiohttp.ClientResponse, quits: bool) -> str | None:
    text, done = "", False
    async for line in answer.content:
        if line.startswith(b"data: {"):
            found = json.loads(line[6:])
            if "error" in found:
                raise ValueError(found["error"]["message"])
            text += found["choices"][0]["text"]
            if quits:
                answer.close()
                return None
        done |= line.startswith(b"data: [DONE]")
    if not done:
        raise ValueError("the stream ended too early")
    return text


async def watch(session: aiohttp.ClientSession, url: str, pid: int, end: float, seen: list[dict[str, Any]]) -> None:
    begun = time.monotonic()
    while time.monotonic() < end:
        async with session.get(f"{url}/v1/status") as answer:
            status = await answer.json()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        rss = pages * os.sysconf("SC_PAGE_SIZE")
        seen.append({"at": time.monotonic() - begun, "rss": rss, **status})
        await asyncio.sleep(1)


async def soak(url: str, pid: int, clients: int, seconds: float, log: dict[str, Any]) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        end = time.monotonic() + seconds
        work = [client(session, url, end, random.Random(i), log) for i in range(clients)]
        await asyncio.gather(watch(session, url, pid, end, seen), *work)
        for _ in range(100):  # until the last that were left are gone
            async with session.get(f"{url}/v1/status") as answer:
                last = await answer.json()
            if not last["running"] and not last["waiting"]:
                break
            await asyncio.sleep(0.1)
        log["pages_used_at_the_end"] = last["pages_used"]
    return seen


def expected(model: Path, kv: str) -> tuple[dict[tuple[str, int], str], dict[tuple[str, int], str]]:
    """Return what LLM.generate says to the prompts as a list, and to each by itself."""
    llm = LLM.load(model, device="cpu", kv=kv)
    listed = {n: llm.generate(PROMPTS, Sampling(max_tokens=n)) for n in TOKENS}
    want = {(p, n): done.text for n in TOKENS for p, done in zip(PROMPTS, listed[n], strict=True)}
    return want, {(p, n): llm.generate(p, Sampling(max_tokens=n)).text for p in PROMPTS for n in TOKENS}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--kv", default="4")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crelle-soak-") as folder:
        model = args.model or Path(folder) / "smollm2-4bit"
        if args.model is None:
            quantize(smollm2(), model, "rtn:bits=4,group=64")
        want, single = expected(model, args.kv)
        command = [sys.executable, "-m", "crelle.cli.main", "serve", str(model), "--kv", args.kv, "--port", "0"]
        log_file = Path(folder) / "log"
        with log_file.open("w") as errors:
            server = subprocess.Popen([*command, "--memory", "1GB"], stdout=subprocess.PIPE, stderr=errors, text=True)
            assert server.stdout
            said = ""
            while not (found := re.search(r"http://[\d.:]+", said)):
                line = server.stdout.readline()
                assert line, log_file.read_text()
                said += line
            print(said, end="", flush=True)
            log: dict[str, Any] = {"answers": 0, "greedy": 0, "left": 0, "refused": 0, "failures": [], "different": []}
            log |= {"as_one_prompt_alone": 0, "want": want, "single": single}
            seen = asyncio.run(soak(found[0], server.pid, args.clients, args.seconds, log))
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
        del log["want"], log["single"]
        warm = [s["rss"] for s in seen if s["at"] >= WARM_UP * args.seconds]
        speeds = [s["tokens_per_second"] for s in seen if s["at"] >= WARM_UP * args.seconds]
        rows = {
            "clients": args.clients,
            "seconds": args.seconds,
            **log,
            "exit_code": code,
            "tracebacks_in_the_log": log_file.read_text().count("Traceback"),
            "rss_mb": {"least": min(warm) / 1e6, "most": max(warm) / 1e6, "last": warm[-1] / 1e6},
            "rss_growth": max(warm) / warm[0] - 1,
            "tokens_per_second": sum(speeds) / len(speeds),
            "most_pages_used": max(s["pages_used"] for s in seen),
        }
    given = [Path(a).name for a in sys.argv[1:]]
    model = args.model.name if args.model else "SmolLM2-135M rtn:bits=4,group=64"
    result = {**facts(), "command": f"python bench/serve_soak.py {' '.join(given)}", "model": model}
    args.out.write_text(json.dumps({**result, "kv": args.kv, **rows}, indent=2) + "\n")
    print(json.dumps(rows, indent=2))
    bad = log["failures"] or log["different"] or code or rows["tracebacks_in_the_log"] or log["pages_used_at_the_end"]
    if bad or rows["rss_growth"] > 0.05:
        sys.exit("the soak failed")


if __name__ == "__main__":
    main()
