"""The document at /openapi.json, from the structs that requests are checked by and answers written from."""

from typing import Any

import msgspec

from crelle.server.schema import response_schemas as answers
from crelle.server.schema.schemas import ModelInfo, RequestSchemas
from crelle.version import __version__

_ERRORS = {
    400: "the request is invalid or can never be served; the message contains the reason",
    401: "the API key is missing or wrong",
    403: "web pages of this origin are not allowed, or the host name is not accepted",
    404: "unknown model or path",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not plain application/json",
    429: "too many requests or large bodies are waiting; retry after the time in Retry-After",
    500: "internal error in this request, or the model produced NaN or infinity",
    503: "the server is shutting down, or its engine has stopped",
    504: "the request timed out",
}
_POST = tuple(_ERRORS)
_REF = "#/components/schemas/"
Schema = dict[str, Any]


def document(info: ModelInfo, schemas: RequestSchemas, *, keys: bool) -> dict[str, Any]:
    """Describe every path; `keys`: whether API keys are asked for."""
    stream: dict[str, Any] = {"text/event-stream": {}}  # where `stream` is true: OpenAI's chunks, then [DONE]
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": [info.name]}}
    bodies = [s.kinds for s in vars(schemas).values()]
    kinds = [answers.Models, answers.Model, answers.TextCompletion, answers.ChatCompletion, answers.Status]
    kinds += [answers.TokenIds, answers.Text, answers.Embeddings, answers.Alive, answers.Error]
    asked = [kind for kinds in bodies for kind in kinds]
    _, components = msgspec.json.schema_components([*asked, *kinds], ref_template=_REF + "{name}")
    takes = {name: _ref(*schema.kinds) for name, schema in vars(schemas).items()}
    alive = _ref(answers.Alive)
    paths = {
        "/v1/models": {"get": _get("the served model", _ref(answers.Models))},
        "/v1/models/{model}": {"get": {**_get("one model", _ref(answers.Model), 404), "parameters": [model]}},
        "/v1/completions": {
            "post": _post("complete prompts", takes["completion"], _ref(answers.TextCompletion), stream)
        },
        "/v1/chat/completions": {"post": _post("answer", takes["chat"], _ref(answers.ChatCompletion), stream)},
        "/v1/status": {"get": _get("status of the engine", _ref(answers.Status))},
        "/tokenize": {"post": _post("the token ids of a text", takes["tokenize"], _ref(answers.TokenIds), {})},
        "/detokenize": {"post": _post("the text of token ids", takes["detokenize"], _ref(answers.Text), {})},
        "/v1/embeddings": {"post": _post("embed texts", takes["embedding"], _ref(answers.Embeddings), {})},
        "/health": {"get": _get("liveness of the process", alive, 503, open_to_all=True)},
        "/ready": {"get": _get("whether the server accepts requests", alive, 503, open_to_all=True)},
        "/metrics": {"get": _get("Prometheus metrics", None)},
        "/openapi.json": {"get": _get("this document", {"type": "object"}, open_to_all=True)},
    }
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": f"Crelle: {info.name}",
            "version": __version__,
            "description": "OpenAI-compatible completions and chat for one quantized model. Unknown parameters "
            "are rejected.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _ref(*kinds: type) -> Schema:
    refs = [{"$ref": _REF + kind.__name__} for kind in kinds]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _responses(kinds: dict[str, Any], errors: tuple[int, ...]) -> dict[str, Any]:
    wrong = {"application/json": {"schema": _ref(answers.Error)}}
    found = {"200": {"description": "done", "content": kinds}}
    return found | {str(status): {"description": _ERRORS[status], "content": wrong} for status in errors}


def _get(says: str, schema: Schema | None, *errors: int, open_to_all: bool = False) -> dict[str, Any]:
    plain = {"text/plain": {"schema": {"type": "string"}}}
    kinds = plain if schema is None else {"application/json": {"schema": schema}}
    needs: dict[str, Any] = {"security": []} if open_to_all else {}
    extra = () if open_to_all else (401,)
    return {"summary": says, "responses": _responses(kinds, (400, *errors, *extra, 403)), **needs}


def _post(says: str, takes: Schema, gives: Schema, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": says,
        "requestBody": {"required": True, "content": {"application/json": {"schema": takes}}},
        "responses": _responses({"application/json": {"schema": gives}, **more}, _POST),
    }
