"""Tokens per second of a batch with a JSON schema and without one, in turns in one process.

    python bench/serving/structured_throughput.py MODEL OUT.json [--batch 16] [--tokens 128] [--rounds 7]
    python bench/serving/structured_throughput.py MODEL OUT.json --shape llama2-7b [--scheme rtn:bits=4,group=128]

First a batch of finished answers is checked against its schema. The timed schema is a list that is not complete within
the tokens, so that all sequences of both kinds run to the same length. `late` counts the masks that were not there when
the logits were. --shape: a model of random weights with MODEL's tokenizer. Processor time counts masks too, though they
run beside the model; machines that others use too do not disturb it.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import jsonschema_rs

from crelle import LLM, Sampling
from crelle.bench.environment import write_result
from crelle.bench.model_shapes import RandomWeights, config_of
from crelle.engine.engine import Engine
from crelle.engine.sampling.grammar import GrammarSpec
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.formats.storage.open import open_weights
from crelle.models.loader import build, choose_device

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 1000}


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("model")
    read.add_argument("out", type=Path)
    read.add_argument("--batch", type=int, default=16)
    read.add_argument("--tokens", type=int, default=128)
    read.add_argument("--rounds", type=int, default=7)
    read.add_argument("--shape", help="of random weights, instead of MODEL's")
    read.add_argument("--scheme", default="rtn:bits=4,group=128", help="of these weights")
    args = read.parse_args()
    llm = LLM.load(args.model) if args.shape is None else random_llm(args.model, args.shape, args.scheme)
    engine = Engine(llm, pages=1000, max_batch=args.batch)
    checked = check(engine, args.batch)
    spec = GrammarSpec("json_schema", json.dumps(PEOPLE))
    for grammar in (spec, None):
        run(engine, grammar, args.batch, args.tokens)
    rows = [[run(engine, g, args.batch, args.tokens) for g in (None, spec)] for _ in range(args.rounds)]
    plain, bound = ([row[i][0] for row in rows] for i in range(2))
    late = sum(row[1][1] for row in rows)
    work = [row[0][2] / row[1][2] for row in rows]
    options = f"--batch {args.batch} --tokens {args.tokens} --rounds {args.rounds}"
    options += "" if args.shape is None else f" --shape {args.shape} --scheme {args.scheme}"
    found = {
        "command": f"python bench/serving/structured_throughput.py {Path(args.model).name} {args.out.name} {options}",
        "batch": args.batch,
        "tokens": args.tokens,
        "answers_checked": checked,
        "tokens_per_second": {"without": round(median(plain), 1), "with": round(median(bound), 1)},
        "with_over_without": round(median(b / p for p, b in zip(plain, bound, strict=True)), 3),
        "ratios": [round(b / p, 3) for p, b in zip(plain, bound, strict=True)],
        "processor_time_without_over_with": round(median(work), 3),
        "late_masks": late,
        "masks": args.rounds * args.batch * args.tokens,
    }
    print(json.dumps(found, indent=1))
    write_result(args.out, found)


def random_llm(path: str, shape: str, scheme: str) -> LLM:
    """Return a model of a shape and random weights, with a model's tokenizer and vocabulary."""
    given, device = open_weights(path), choose_device("auto")
    weights = RandomWeights({**config_of(shape), "vocab_size": given.config["vocab_size"]}, scheme, device)
    return LLM(build(weights, device), Tokenizer.of(given), weights)


def check(engine: Engine, batch: int) -> int:
    """Have answers finished, and compare each with its schema; return how many."""
    spec = GrammarSpec("json_schema", json.dumps(PERSON))
    handles = [
        engine.add("A person:", Sampling(max_tokens=200, temperature=0.7, seed=i), grammar=spec) for i in range(batch)
    ]
    engine.run()
    done = [h.outputs[0].completion for h in handles if h.outputs[0].completion.finish_reason == "stop"]
    for completion in done:
        jsonschema_rs.validate(PERSON, json.loads(completion.text))
    if not done:
        raise SystemExit("no answer came to its end")
    return len(done)


def run(engine: Engine, grammar: GrammarSpec | None, batch: int, tokens: int) -> tuple[float, int, float]:
    """Return tokens per second of a batch, prompts included, its late masks, and its processor time."""
    prompts = [[1, *range(300 + 7 * i, 307 + 7 * i)] for i in range(batch)]
    handles = [
        engine.add(p, Sampling(max_tokens=tokens, temperature=0.8, seed=i), grammar=grammar, ignore_end=True)
        for i, p in enumerate(prompts)
    ]
    states = [engine._active[h.request.sequences[0]][1].grammar for h in handles]
    begun, worked = perf_counter(), process_time()
    engine.run()
    seconds, work = perf_counter() - begun, process_time() - worked
    sampled = sum(len(h.outputs[0].completion.tokens) for h in handles)
    assert sampled == batch * tokens, f"{sampled} tokens, not {batch * tokens}"
    return sampled / seconds, sum(s.waited for s in states if s is not None), work


if __name__ == "__main__":
    main()
