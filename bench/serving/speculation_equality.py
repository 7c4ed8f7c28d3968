"""Greedy answers with guessed tokens equal those without, token for token, over many prompts.

    python bench/serving/speculation_equality.py MODEL TEXT OUT.json [--prompts 500] [--tokens 32] [--kv 16,4]

Prompts are pieces of TEXT's lines; every tenth answer is sampled with a seed instead, which must not change it either.
For each cache: one batch-invariant engine without drafts, one that drafts as it pays, one that always drafts. Exit
status 1: some answer differs.
"""

import argparse
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from crelle import LLM, Sampling
from crelle.bench.environment import write_result
from crelle.engine.engine import Engine

WAYS = ("off", "ngram", "ngram:adaptive=false")


def prompts(llm: LLM, text: Path, count: int) -> list[list[int]]:
    """Return the first 8 to 63 tokens of lines that have as many."""
    lines = (llm.tokenizer.encode(line) for line in text.read_text(encoding="utf-8").splitlines() if line.strip())
    found = list(islice((ids[: 8 + i % 56] for i, ids in enumerate(lines) if len(ids) >= 64), count))
    if len(found) < count:
        raise SystemExit(f"{text} has {len(found)} lines of at least 64 tokens, not {count}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--kv", default="16,4", help="formats of the cache, separated by commas")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if not args.text.is_file():
        parser.error(f"there is no file {args.text}")
    llm = LLM.load(args.model, device=args.device)
    given = prompts(llm, args.text, args.prompts)
    asked = [Sampling(max_tokens=args.tokens, temperature=0.8 * (i % 10 == 9), seed=i) for i in range(len(given))]
    rows, wrong = list[dict[str, Any]](), 0
    for kv in args.kv.split(","):
        plain: list[list[int]] = []
        for way in WAYS:
            engine = Engine(
                llm, kv=kv, pages=16 * args.batch, max_batch=args.batch, batch_invariant=True, speculate=way
            )
            begun = perf_counter()
            handles = [engine.add(ids, how, ignore_end=True) for ids, how in zip(given, asked, strict=True)]
            engine.run()
            answers = [handle.outputs[0].completion.tokens for handle in handles]
            plain = plain or answers
            equal, stats = sum(a == b for a, b in zip(answers, plain, strict=True)), engine.stats
            wrong += len(given) - equal
            row = {"kv": kv, "speculate": way, "prompts": len(given), "equal": equal, "seconds": perf_counter() - begun}
            row |= {"tokens": stats.tokens_sampled, "steps": stats.steps}
            rows.append(row | {"drafted": stats.tokens_drafted, "accepted": stats.tokens_accepted})
            print(rows[-1], flush=True)
    options = f"--prompts {args.prompts} --tokens {args.tokens} --batch {args.batch} --kv {args.kv}"
    command = f"python bench/serving/speculation_equality.py {Path(args.model).name} {args.text.name} {args.out.name}"
    write_result(args.out, {"command": f"{command} {options}", "device": str(llm.model.device), "rows": rows})
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
