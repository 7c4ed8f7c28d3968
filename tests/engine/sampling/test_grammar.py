"""Answers match their schema, expression or grammar: in batches, through preemptions, with other requests beside."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from conftest import write_tiny_model
from sampled_cases import every_case

from crelle import LLM, Sampling
from crelle.engine.engine import Engine
from crelle.engine.sampling.grammar import GrammarSpec, one_of
from crelle.errors import CapacityError, CrelleError, SchemeError
from crelle.kernels.threads import set_threads

SCHEMAS = 1000 if every_case else 80


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    set_threads(1)
    yield
    set_threads(None)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    at = tmp_path_factory.mktemp("grammar") / "m"
    return LLM.load(write_tiny_model(at, max_position_embeddings=2048), device="cpu")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of bounded strings and lists, so that even a random model comes to an end."""
    kinds = ["string", "integer", "boolean", "null", "enum", "number", "pattern", "const"]
    kinds += ["object", "array", "anyOf", "tuple"] if depth < 3 else []
    low = rng.randint(-50, 50)
    match "object" if depth == 0 else rng.choice(kinds):
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice([r"^[a-z]{1,4}$", r"^(foo|bar)-\d{2}$", r"^\w{2,3}$"])}
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
        case "number":
            return {"type": "number", "exclusiveMinimum": low, "maximum": low + 3}
        case "enum":
            return {"enum": rng.sample(["a", 1, None, "é\n", True, [1, "b"], {"x": 1}], rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(["fixed", 42, None])}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "tuple":
            parts = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        case "array":
            return {
                "type": "array",
                "items": random_schema(rng, depth + 1),
                "minItems": 0,
                "maxItems": rng.randint(1, 3),
            }
        case "object":
            names = rng.sample(["name", "age", "x y", "é", "b1", "tags"], rng.randint(0, 4))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case kind:
            return {"type": kind}


def test_every_finished_answer_matches_its_random_schema(llm: LLM) -> None:
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(SCHEMAS)]
    engine = Engine(llm, pages=400, max_batch=32)
    handles = []
    for i, schema in enumerate(schemas):
        sampling = Sampling(max_tokens=400, temperature=rng.choice([0.0, 0.7, 1.3]), seed=i)
        handles.append(engine.add(f"Number {i}", sampling, grammar=GrammarSpec("json_schema", json.dumps(schema))))
    engine.run()
    finished = 0
    for schema, handle in zip(schemas, handles, strict=True):
        output = handle.outputs[0]
        assert output.error is None, (schema, output.error)
        if output.completion.finish_reason == "stop":
            finished += 1
            jsonschema_rs.validate(schema, json.loads(output.completion.text))
    print(f"{finished} of {SCHEMAS} answers finished, and match their schemas")
    assert finished >= 0.8 * SCHEMAS


CASES: dict[str, tuple[GrammarSpec, str]] = {
    "regex": (GrammarSpec("regex", "[a-c]{3,5}(foo|bär)"), "[a-c]{3,5}(foo|bär)"),
    "choice": (one_of(["yes", "no", 'm"ay\nbe é']), 'yes|no|m"ay\nbe é'),
    "gbnf": (GrammarSpec("grammar", 'root ::= "x" [0-9] [0-9]? "y"'), "x[0-9]{1,2}y"),
    "lark": (GrammarSpec("grammar", 'start: "hello" " " /[a-z]{1,3}/ "!"'), "hello [a-z]{1,3}!"),
}


def add_all(engine: Engine) -> list[Any]:
    found = []
    for i, (name, (spec, _)) in enumerate(CASES.items()):
        sampling = Sampling(max_tokens=40, temperature=1.0, seed=i, frequency_penalty=0.1 * i)
        found.append(engine.add(f"{name}: ", sampling, n=3, grammar=spec, logprobs=1))
        found.append(engine.add(f"{name}: ", Sampling(max_tokens=20), n=1))
    engine.run()
    return found


def test_they_are_the_same_alone_in_a_batch_and_after_preemptions(llm: LLM) -> None:
    engines = [{"pages": 300, "max_batch": 16}, {"pages": 9, "max_batch": 8, "watermark": 0}, {"max_batch": 3}]
    runs = [add_all(Engine(llm, **{"pages": 100, **options})) for options in engines]  # type: ignore[arg-type]
    texts = [[[o.completion.text for o in handle.outputs] for handle in run] for run in runs]
    assert texts[0] == texts[1] == texts[2]
    assert any(o.preemptions for handle in runs[1] for o in handle.outputs)
    for (_, pattern), outputs in zip(CASES.values(), texts[0][::2], strict=True):
        assert all(re.fullmatch(pattern, text) for text in outputs), outputs
    plain = [llm.generate(f"{name}: ", Sampling(max_tokens=20)).text for name in CASES]
    assert [outputs[0] for outputs in texts[0][1::2]] == plain, "others are not touched"


def test_logprobs_are_the_models_own_and_stop_strings_end(llm: LLM) -> None:
    engine = Engine(llm, pages=100)
    spec = GrammarSpec("regex", "[ab]{30}")
    free = engine.add("Hello", Sampling(max_tokens=1), logprobs=5)
    bound = engine.add("Hello", Sampling(max_tokens=40), logprobs=5, grammar=spec)
    stopped = engine.add("Hello", Sampling(max_tokens=40, stop=("b", "aa")), grammar=spec)
    engine.run()
    first = [h.outputs[0].logprobs[0] for h in (free, bound)]
    assert first[0].top == first[1].top
    assert len(bound.outputs[0].completion.text) == 30
    assert len(stopped.outputs[0].completion.text) < 2


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", '{"type": "strin"}', "the JSON schema is invalid: Invalid type: strin"),
        ("json_schema", "[1", "the JSON schema is invalid"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "Unsatisfiable schema"),
        ("json_schema", '{"$ref": "http://127.0.0.1/x"}', "is not present in a registry"),
        ("json_schema", '{"type": "object", "properties": {"a": false}, "required": ["a"]}', "schema"),
        ("regex", "(a", "the regular expression is invalid"),
        ("grammar", "root ::= foo", "the grammar is invalid"),
        ("grammar", "start: start", "the grammar takes too much work|allows no answer"),
        ("grammar", "start: " + "(" * 5000, "the grammar"),
        ("regex", "a" * 70_000, "70000 characters; at most 65536"),
    ],
)
def test_bad_grammars_are_refused_in_a_sentence(llm: LLM, kind: Any, text: str, says: str) -> None:
    engine = Engine(llm, pages=20)
    with pytest.raises(CrelleError, match=says) as found:
        engine.add("Hello", grammar=GrammarSpec(kind, text))
    assert isinstance(found.value, SchemeError | CapacityError)
    assert len(str(found.value)) < 500
    assert not engine.step()


def test_a_mask_that_fails_ends_its_own_sequence(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(llm, pages=50)
    bad = engine.add("Hello", Sampling(max_tokens=9), grammar=GrammarSpec("regex", "[a-z]{20}"))
    good = engine.add("Hello", Sampling(max_tokens=9), grammar=GrammarSpec("regex", "[0-9]{20}"))
    state = engine._active[bad.request.sequences[0]][1].grammar
    assert state is not None
    accept = state.accept

    def breaks(token: int) -> None:
        accept(token)
        assert not state.matcher.consume_token(llm.encode("7")[-1])  # a matcher in error, as beyond its limits

    monkeypatch.setattr(state, "accept", breaks)
    engine.run()
    assert isinstance(bad.outputs[0].error, CapacityError)
    assert "the regular expression takes too much work" in str(bad.outputs[0].error)
    assert len(bad.outputs[0].completion.tokens) == 1
    assert good.outputs[0].completion.finish_reason == "length"
