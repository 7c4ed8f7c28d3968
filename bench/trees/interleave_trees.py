"""Short measurements of two trees in turns on the CPU: one process of each stays loaded, and they run burst by burst.

    python bench/trees/interleave_trees.py OLD NEW OUT.json [--threads 2] [--bursts 40] [--only rtn]

For machines whose speed moves within seconds, where whole processes after each other cannot be compared
(compare_trees.py). OLD and NEW are checkouts; each needs its C++ core at TREE/build/dev. A burst is 10 decode
steps, one prompt, or one load of 16 requests; while one process works, the other waits for its next command.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

SCHEMES = {"rtn 4": "rtn:bits=4,group=64", "bcq 3": "bcq:bits=3,group=64"}


def worker(threads: int, only: str) -> None:
    """Answer each line, the name of a measurement, with the seconds that it took; only: of these schemes."""
    import torch

    from crelle import Sampling
    from crelle.engine.engine import Engine
    from crelle.kernels.threads import set_threads

    try:
        from crelle.bench.load.model_sources import random_llm
    except ImportError:  # where it stood before the package crelle.bench
        from crelle.eval.serve_models import random_llm  # type: ignore[import-not-found,no-redef]
    set_threads(threads)
    torch.manual_seed(0)
    tokens = random.Random(1)
    work: dict[str, Callable[[], Any]] = {}

    def ids(n: int) -> list[int]:
        return [tokens.randrange(100, 40000) for _ in range(n)]

    def measurements(name: str, scheme: str) -> None:
        llm = random_llm("smollm2-135m", scheme, torch.device("cpu"))
        model, one = llm.model, torch.tensor([[7]])
        cache = model.new_cache(1)
        engine = Engine(llm, kv="16", pages=1024, max_batch=16)

        def serve(n: int, prompt: int, answer: int) -> None:
            for _ in range(n):
                engine.add(ids(prompt), Sampling(max_tokens=answer), ignore_end=True)
            engine.run()

        def steps() -> None:
            cache.length = 128
            with torch.inference_mode():
                for _ in range(10):
                    model(one, cache)

        with torch.inference_mode():
            model(torch.tensor([ids(128)]), cache)
        work[f"{name}: 10 steps"] = steps
        work[f"{name}: generate, prompt of 512"] = lambda: llm.generate(ids(512), Sampling(max_tokens=1))
        work[f"{name}: engine, prompt of 512"] = lambda: serve(1, 512, 1)
        work[f"{name}: engine, 1 request of 128 + 64"] = lambda: serve(1, 128, 64)
        work[f"{name}: engine, 16 requests of 128 + 64"] = lambda: serve(16, 128, 64)

    for name, scheme in SCHEMES.items():
        if only in name:
            measurements(name, scheme)
    for run in work.values():
        run()
    print(json.dumps(list(work)), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        work[line.strip()]()
        print(time.perf_counter() - begun, flush=True)


def start(tree: Path, threads: int, only: str) -> "subprocess.Popen[str]":
    from compare_trees import DROP_EDITABLE, environment_of  # not in the worker: OLD may lack what it imports

    code = f"{DROP_EDITABLE}runpy.run_path({__file__!r}, run_name='worker')"
    command = [sys.executable, "-c", code, str(threads), only]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment_of(tree))


def ask(process: "subprocess.Popen[str]", name: str) -> float:
    assert process.stdin
    assert process.stdout
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    from crelle.bench.environment import write_result

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bursts", type=int, default=40, help="of a prompt; steps have four times as many")
    parser.add_argument("--only", default="", help="a part of the schemes' names: rtn, bcq")
    args = parser.parse_args()
    paths = {"old": args.old, "new": args.new}
    trees = {label: start(tree.resolve(), args.threads, args.only) for label, tree in paths.items()}
    names = {label: json.loads(p.stdout.readline()) for label, p in trees.items() if p.stdout}
    rows = []
    for name in names["new"]:
        times = 4.0 if "steps" in name else 0.2 if "16 requests" in name else 0.4 if "request" in name else 1.0
        found: dict[str, list[float]] = {"old": [], "new": []}
        for turn in range(round(args.bursts * times)):
            for label in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                found[label].append(1e3 * ask(trees[label], name))
        middle = {label: median(each) for label, each in found.items()}
        best = {label: min(each) for label, each in found.items()}
        ratio = median(n / o for o, n in zip(found["old"], found["new"], strict=True))
        print(f"{name}: median {middle}, best {best}, median of new / old {ratio:.3f}", flush=True)
        rows.append({"name": name, "milliseconds": found, "median": middle, "best": best, "new_over_old": ratio})
    for process in trees.values():
        process.kill()
    command = f"python bench/trees/interleave_trees.py OLD NEW {args.out.name} --threads {args.threads}"
    command += f" --bursts {args.bursts}" + (f" --only {args.only}" if args.only else "")
    write_result(args.out, {"command": command, "rows": rows})


if __name__ == "__main__":
    main()
elif __name__ == "worker":
    worker(int(sys.argv[1]), sys.argv[2])
