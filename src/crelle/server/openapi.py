"""The document at /openapi.json, from the schemas that requests are checked by."""

from typing import Any

from crelle.server import schemas
from crelle.server.schemas import ModelInfo
from crelle.server.validation import Schema
from crelle.version import __version__

_ERRORS = {
    400: "the request makes no sense, or can never be served: the message says why",
    401: "the API key is missing or wrong",
    403: "a web page of this origin may not call, or the server is not called by this name",
    404: "there is no such model or page",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not plain application/json",
    429: "too many requests or large bodies wait already; Retry-After says when to come again",
    500: "the server failed on this request, or the model computed values that are not finite",
    503: "the server is shutting down, or its engine has stopped",
    504: "the request took too long",
}
_POST = tuple(_ERRORS)


def document(info: ModelInfo, *, keys: bool) -> dict[str, Any]:
    """Describe every path; `keys`: whether API keys are asked for."""
    stream: dict[str, Any] = {"text/event-stream": {}}  # where `stream` is true: OpenAI's chunks, then [DONE]
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": [info.name]}}
    paths = {
        "/v1/models": {"get": _get("the model that is served", schemas.MODELS)},
        "/v1/models/{model}": {"get": {**_get("one model", schemas.MODEL, 404), "parameters": [model]}},
        "/v1/completions": {"post": _post("complete prompts", schemas.completion(info), schemas.COMPLETION, stream)},
        "/v1/chat/completions": {"post": _post("answer", schemas.chat(info), schemas.CHAT, stream)},
        "/v1/status": {"get": _get("what the engine is doing", schemas.STATUS)},
        "/tokenize": {"post": _post("the token ids of a text", schemas.tokenize(info), schemas.TOKENS, {})},
        "/health": {"get": _get("whether the process lives", schemas.ALIVE, 503, open_to_all=True)},
        "/ready": {"get": _get("whether it takes requests", schemas.ALIVE, 503, open_to_all=True)},
        "/metrics": {"get": _get("for Prometheus", None)},
        "/openapi.json": {"get": _get("this document", {"type": "object"}, open_to_all=True)},
    }
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": f"Crelle: {info.name}",
            "version": __version__,
            "description": "OpenAI's completions and chat, from one model at few bits. Unknown parameters are refused.",
        },
        "paths": paths,
        "components": {"schemas": {"Error": schemas.ERROR}},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _responses(kinds: dict[str, Any], errors: tuple[int, ...]) -> dict[str, Any]:
    wrong = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
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
