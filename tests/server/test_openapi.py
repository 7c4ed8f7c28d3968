"""The OpenAPI document is true: the checker agrees with JSON Schema, and schemathesis finds no lie."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import jsonschema_rs
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampled_cases import share_of
from schemathesis.checks import CHECKS, load_all_checks
from tiny_server import nested_llm, serving

from crelle.server.errors import ApiError
from crelle.server.schema.schemas import ModelInfo, RequestSchemas
from crelle.server.schema.strict_json import parse
from crelle.server.schema.validation import Schema
from crelle.server.settings import Keys

INFO = ModelInfo("tiny", 64, 259, (2, 3, 4), 500, 8, 3, 4)
LEAST: dict[str, Any] = {
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "respond": {"input": "a"},
    "detokenize": {"tokens": [1]},
    "embedding": {"input": "a"},
}
FORMS = (  # OpenAPI cannot say which schemas, expressions and grammars are valid, and which tools may be named
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("tools", "tool_choice", "text"),
)
REQUESTS = vars(RequestSchemas(INFO))
load_all_checks()

atoms = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(-2, 3, allow_nan=False)
    | st.sampled_from([1.0, 2.0, 2**63, 1e300])
    | st.text(max_size=8)
    | st.sampled_from(["", "tiny", "text", "user", "none", "auto"])
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "include_usage", "x", "0", "17", "258", "259", "007"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def complaint(work: Callable[[], Any]) -> ApiError | None:
    try:
        work()
    except ApiError as e:
        return e
    return None


def json_schema(kinds: tuple[type, ...]) -> tuple[dict[str, Any], set[str]]:
    """What /openapi.json says of a body, and the names of its parameters."""
    options, named = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    return {"anyOf": list(options), "$defs": named}, {f for kind in kinds for f in named[kind.__name__]["properties"]}


@pytest.mark.parametrize("name", REQUESTS)
@settings(max_examples=share_of(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_checker_agrees_with_json_schema(name: str, data: st.DataObject) -> None:
    """Bodies that are valid but for some parameters; jsonschema_rs is the oracle."""
    schema = REQUESTS[name]
    published, fields = json_schema(schema.kinds)
    body: Any = dict(LEAST.get(name, {"prompt": "a"}))
    body |= data.draw(st.dictionaries(st.sampled_from([*sorted(fields), "unknown"]), values, max_size=3))
    body = data.draw(st.sampled_from([body, body, body, body, [body], None]))
    error = complaint(lambda: schema.check(parse(json.dumps(body).encode())))
    assert (error is None) == jsonschema_rs.is_valid(published, body)
    assert error is None or (error.status == 400 and len(error.message) < 400)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_json_or_a_sentence(body: bytes) -> None:
    if error := complaint(lambda: parse(body)):
        assert error.status == 400
        assert error.message.startswith("the body is")
    else:
        assert parse(body) == json.loads(body)


def test_a_keyword_that_the_checker_does_not_know_is_not_overlooked() -> None:
    published = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": "y"})]
    with pytest.raises(AssertionError, match="pattern"):
        Schema(msgspec.defstruct("Body", [("x", published)]))


@pytest.mark.parametrize(
    ("keys", "examples"),
    [(False, 10), (True, 4), pytest.param(False, 200, marks=pytest.mark.slow)],
    ids=["open", "keys", "open, at length"],
)
def test_schemathesis_finds_nothing(keys: bool, examples: int) -> None:
    secret = {"Authorization": "Bearer sesame"} if keys else {}
    asked = Keys.of("sesame") if keys else Keys()
    small: Any = {
        "max_tokens": 4,
        "engine": {"queue_limit": 64, "max_batch": 4},
        "max_body": 1 << 26,
        "max_prompt": 4000,
    }
    with serving(nested_llm(), keys=asked, **small) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        assert len(operations) == 12, "all but the document itself"
        for operation in operations:

            @settings(
                max_examples=examples if operation.method == "post" else 3,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def right(case: Any) -> None:
                for name in FORMS if isinstance(case.body, dict) else ():
                    case.body.pop(name, None)
                case.call_and_validate(headers=secret, checks=CHECKS.get_all())

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
            def wrong(case: Any) -> None:
                case.call_and_validate(headers=secret, checks=CHECKS.get_all())

            right()
            if operation.body:
                wrong()
        server.assert_empty()
        assert server.state.metrics.requests.get(("/v1/completions", 200), 0) >= 2
        assert server.state.metrics.requests.get(("/v1/chat/completions", 400), 0) >= 2
