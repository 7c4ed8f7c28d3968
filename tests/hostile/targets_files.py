"""Targets for the small files: schemes, plans, journals, tasks, traces, results, requests, generation configs."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutate
import torch
from conftest import TINY
from target_base import Target

from crelle.bench.load.trace import read_trace
from crelle.bench.planner.plan_shapes import LARGE, describe
from crelle.bench.report.contents import figures, headlines, not_drawn, sections
from crelle.bench.report.page import page
from crelle.bench.report.readers import read
from crelle.cli.commands.ablate import _known
from crelle.engine.generation_config import recommended_sampling
from crelle.engine.loaded_model import _end_ids
from crelle.errors import CrelleError, FormatError
from crelle.eval.tasks.items import read_items
from crelle.eval.tasks.journal import Journal
from crelle.eval.tasks.spec import parse_spec
from crelle.formats.base import FORMATS
from crelle.formats.kv.format import KVFormat
from crelle.formats.storage.checkpoint_writer import CheckpointWriter
from crelle.formats.storage.io import parse_json
from crelle.quantizers.pipeline import _block_losses, _finished_stage
from crelle.quantizers.scheme import parse
from crelle.quantizers.search.plan_file import read_plan
from crelle.server.errors import ApiError
from crelle.server.requests import RequestParser
from crelle.server.schema.schemas import ModelInfo
from crelle.server.schema.strict_json import parse as parse_body

SCHEMES = ["fp16", "rtn:bits=4,group=128", "bcq:bits=3,group=row,rounds=20", "gptq:bits=3,group=128", "awq:bits=4"]
SCHEMES += ["hbcq:bits=3,group=64", "bcq-nested:bits=4,group=128,lowest=2", "mixed:group=16,four=0.25,outliers=0.002"]
SCHEMES += ["atom:w=4,a=4,kv=4,group=128,outliers=128", "auto:bits=3.3,tune=full", "keep"]
CACHES = ["4", "kv8", "k4v2", "kv4:group=64,center=false", "4,layers.0=8,layers.28-29=k8v4", "kv4:page=64"]
RESULTS = Path(__file__).parents[2] / "bench" / "results"


def scheme_target(_: Path) -> Target:
    def run(value: Any) -> None:
        if not isinstance(value, dict):
            return
        if isinstance(scheme := value.get("scheme"), str):
            config = parse(scheme)
            if parse(str(config)) != config:
                raise AssertionError(f"{config} does not round-trip")
            config.storage((8, 256))
        if isinstance(cache := value.get("kv"), str):
            kv = KVFormat.parse(cache)
            if KVFormat.parse(str(kv)) != kv:
                raise AssertionError(f"{kv} does not round-trip")
            kv.layers(40)

    seeds = [{"scheme": s, "kv": CACHES[i % len(CACHES)]} for i, s in enumerate(SCHEMES)]
    words = [*SCHEMES, *CACHES, "bits=", "group=", ",layers.0-99=8", ":page=", "outliers=", "clip=false", "rounds=0"]
    return Target(run, seeds, [*mutate.ODD, *words])


def plan_target(tmp: Path) -> Target:
    def run(value: Any) -> None:
        (tmp / "plan.json").write_text(json.dumps(value))
        read_plan(tmp / "plan.json")

    plan = {
        "plan_version": 1,
        "recipe": "bcq:bits=3,group=64",
        "scheme": "bcq:bits=3,group=64",
        "bits_per_weight": 3.25,
        "predicted_loss": 0.5,
        "notes": {"text": "wiki"},
        "overrides": {"a.q": "bcq:bits=2,group=32", "a.k": "bcq:bits=4,group=row"},
    }
    other = {**plan, "recipe": "gptq:bits=3,group=64", "overrides": {"a.q": "gptq:bits=2,group=32"}}
    return Target(run, [plan, other], [*mutate.ODD, *SCHEMES, *plan])


def planned_target(_: Path) -> Target:
    """`crelle plan DIRECTORY`: the sizes of a model that is only described."""

    def run(config: Any) -> None:
        shape = describe("m", parse_json(json.dumps(config).encode(), "config.json"))
        shape.stored_bytes(parse("rtn:bits=4,group=128"))

    seeds = [TINY, *(json.loads(json.dumps(config)) for config in LARGE.values())]
    return Target(run, seeds, [*mutate.ODD, *TINY, *LARGE["qwen3-30b-a3b"], "num_local_experts"])


def journal_target(tmp: Path) -> Target:
    """progress.json of an unfinished run, with its shard; stage.json, training.json, the rows of an ablation."""
    out, recipe = tmp / "out", {"crelle": "0", "scheme": "rtn:bits=4,group=8"}
    spec = {"format": "mixed", "shape": [8, 24], "group": 8, "packing": "general", "block": 4, "four": 1, "outliers": 3}
    with CheckpointWriter(out, recipe) as writer:
        w = FORMATS["mixed"].random(spec, torch.Generator().manual_seed(0))
        writer.add("crelle-00001-of-00002.safetensors", {"a.up": w}, {"a.norm": torch.ones(3)}, ["it was odd"])
    held = {f.name: f.read_bytes() for f in writer.partial.iterdir()}
    stage = {"recipe": {"scheme": "x", "devices": 1}, "warnings": ["w"]}
    row = {"name": "a", "scheme": "fp16", "kv": "16", "perplexity": 9.0, "ratio": 1.0, "bits_per_weight": 16.0}
    rows = {"model": "m", "rows": [{**row, "seconds": 1.0}]}

    def run(value: Any) -> None:
        if not isinstance(value, dict):
            return
        if "journal" in value:
            writer.partial.mkdir(exist_ok=True)
            for name, data in held.items():
                (writer.partial / name).write_bytes(data)
            (writer.partial / "progress.json").write_text(json.dumps(value["journal"]))
            with CheckpointWriter(out, recipe, resume=True) as resumed:
                resumed.all_warnings()
                for name in held:
                    if resumed.has(name):
                        resumed.contents(name)
        for key, name in (("stage", "stage.json"), ("training", "training.json"), ("rows", "a.partial.json")):
            (tmp / name).write_text(json.dumps(value.get(key, {})))
        _finished_stage(tmp, stage["recipe"], overwrite=False)  # type: ignore[arg-type]
        _block_losses(tmp)
        if "rows" in value:
            _known(tmp / "a.partial.json", {"model": "m"})

    journal = json.loads(held["progress.json"])
    seeds = [{"journal": journal}, {"stage": stage, "training": {"blocks": {"0": [1.0, None]}}}, {"rows": rows}]
    words = ["crelle_journal", "recipe", "shards", "specs", "names", "bytes", "warnings", *row, "blocks", "format"]
    return Target(run, seeds, [*mutate.ODD, *words, "mixed", "bcq", "crelle-00002-of-00002.safetensors", "nested"])


def task_target(tmp: Path) -> Target:
    """A task's description, its data, and the journal of its results."""

    def run(value: Any) -> None:
        if not isinstance(value, dict):
            return
        if isinstance(text := value.get("yaml"), str):
            (tmp / "t.yaml").write_text(text, errors="replace")
            lines = value.get("lines") if isinstance(value.get("lines"), list) else []
            (tmp / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
            spec = parse_spec("t", tmp / "t.yaml", tmp)
            if spec.data == tmp / "t.jsonl":
                read_items(spec)
        if isinstance(results := value.get("results"), list):
            for old in tmp.glob("j-*"):
                old.unlink()
            with Journal.open(tmp, "j", {"task": "t"}, 10**9) as journal:
                file = journal._path
            with file.open("a", errors="replace") as f:
                f.write("".join(json.dumps(r) + "\n" for r in results))
            with Journal.open(tmp, "j", {"task": "t"}, 10**9):
                pass

    choice = 'type: multiple_choice\nprompt: "{query}\\nAnswer:"\nchoices: choices\nanswer: gold\n'
    shared = 'type: shared_ending\nprompts: p\nending: "{e}"\nanswer: gold\n'
    result = {"line": 1, "correct": True, "correct_norm": None, "loglikelihoods": [-1.5, -2.0], "text": None}
    seeds = [
        {"yaml": choice, "lines": [{"query": "a?", "choices": ["b", "c"], "gold": 1}]},
        {"yaml": shared, "lines": [{"p": ["a", "b"], "e": "c d", "gold": 0}]},
        {"yaml": 'type: last_word\ntext: "{text}"\n', "lines": [{"text": "the last word"}]},
        {
            "yaml": 'type: generate\nprompt: "{q}"\nanswer: a\nmax_tokens: 32\nstop: ["."]\n',
            "lines": [{"q": "1", "a": ["2", "3"]}],
        },
        {"results": [result, {**result, "line": 2, "correct_norm": False, "text": "x"}]},
    ]
    bomb = "- &a [x, x, x, x]\n" + "".join(
        f"- &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
    )
    words = ["&a [*a]", "*a", "!!python/object:os.system", "{query}{query}", "max_tokens: ", bomb, "? ", "<<: *a\n"]
    return Target(run, seeds, [*mutate.ODD, *words, "data: ", "2026-11-18", "1_0", "0x10", "1:2:3", "choices", "gold"])


def trace_target(tmp: Path) -> Target:
    def run(data: bytes) -> None:
        (tmp / "t.csv").write_bytes(data)
        read_trace(tmp / "t.csv", context=4096, rate=2.0, seconds=60)

    azure = (
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.99,396,109\n"
    )
    return Target(
        run, [azure, b"seconds,prompt,tokens\n0.0,10,20\n1.5,30,40\n"], ["1e308", "nan", "inf", "-1", '"', "9999-12-31"]
    )


def report_target(tmp: Path) -> Target:
    def run(value: Any) -> None:
        (tmp / "r.json").write_text(json.dumps(value))
        rows, left_out = read([tmp / "r.json"])
        parts = sections(rows)
        left_out += not_drawn(rows, parts)
        figures(parts)
        page("t", headlines(rows), parts, left_out)
        if not rows:
            raise FormatError(left_out[0].reason)

    seeds: dict[str, Any] = {}
    for file in sorted(RESULTS.glob("*.json")):
        found = json.loads(file.read_text())
        if isinstance(found, dict) and isinstance(rows := found.get("rows"), list) and rows:
            found["rows"] = rows[:2]
            kind = " ".join(rows[0]) if isinstance(rows[0], dict) else ""
            if len(json.dumps(found)) < 5000:
                seeds.setdefault(kind, found)
    return Target(run, list(seeds.values())[:12], [*mutate.ODD, "rows", "scheme", "batch", "4096x4096", "shape", "kv"])


def request_target(_: Path) -> Target:
    parser = RequestParser(ModelInfo("tiny", 40_000, 259, (2, 3, 4), 500, 8, 3, 4))
    ways: dict[str, Callable[[Any], Any]] = {
        "completion": parser.completion,
        "chat": parser.chat,
        "tokenize": parser.tokenize,
    }

    def run(value: Any) -> None:
        if not isinstance(value, dict) or not isinstance(way := value.get("way"), str) or way not in ways:
            return
        body = value.get("body")
        text = value["raw"] if isinstance(value.get("raw"), str) else json.dumps(body)
        try:
            ways[way](parse_body(text.encode("utf-8", "surrogatepass")))
        except ApiError as e:
            raise CrelleError(e.message) from e

    completion = {
        "model": "tiny",
        "prompt": "Hi",
        "max_tokens": 4,
        "n": 2,
        "temperature": 0.5,
        "stop": ["."],
        "seed": 1,
    }
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "logprobs": True}
    seeds: list[Any] = [
        {"way": "completion", "body": completion},
        {"way": "completion", "body": {"prompt": [[1, 2], [3]], "logprobs": 2, "top_k": 5, "precision": 3}},
        {"way": "completion", "body": {"prompt": [1, 2, 3.0], "stream": True, "logit_bias": {"5": 1}}},
        {"way": "chat", "body": {**chat, "top_logprobs": 2, "stream_options": {"include_usage": True}}},
        {"way": "tokenize", "body": {"prompt": "Hi", "add_special_tokens": False}},
        {"way": "tokenize", "body": {"messages": chat["messages"]}},
        {"way": "chat", "raw": '{"messages": [{"role": "user", "content": "\\ud800"}], "n": 1e2}'},
    ]
    words = [
        *completion,
        "messages",
        "role",
        "system",
        "developer",
        "response_format",
        "tools",
        "[" * 99,
        "1e999",
        "NaN",
    ]
    return Target(run, seeds, [*mutate.ODD, *words, "chat", "completion", "tokenize", "raw"])


def generation_target(tmp: Path) -> Target:
    def run(value: Any) -> None:
        (tmp / "generation_config.json").write_text(json.dumps(value))
        weights: Any = SimpleNamespace(path=tmp, config={"eos_token_id": 1})
        recommended_sampling(weights)
        _end_ids(weights)

    said = {"eos_token_id": [258, 3], "temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "do_sample": True}
    return Target(run, [said, {**said, "repetition_penalty": 1.1}, {"top_k": 5.0}], [*mutate.ODD, *said])


FILE_TARGETS: dict[str, Callable[[Path], Target]] = {
    "scheme": scheme_target,
    "plan": plan_target,
    "planned": planned_target,
    "journal": journal_target,
    "task": task_target,
    "trace": trace_target,
    "report": report_target,
    "request": request_target,
    "generation": generation_target,
}
