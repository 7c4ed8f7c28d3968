"""Every answer that is not a success: a status, and OpenAI's shape {"error": {message, type, param, code}}.

The openai client turns the status into its exception classes:
    400 BadRequestError · 401 AuthenticationError · 403 PermissionDeniedError · 404 NotFoundError
    429 RateLimitError · 500 and above InternalServerError
"""

import asyncio

from crelle.engine.requests.output import QueueFullError
from crelle.errors import CapacityError, CrelleError, NumericsError, SchemeError
from crelle.server.schema.response_schemas import Error, Problem

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

PASSED_ON = (asyncio.CancelledError, GeneratorExit, ConnectionError)  # the client is gone


class ApiError(Exception):
    """An answer with an error in it; the message is for the person who wrote the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers, self.close = headers or {}, close  # close: what the client still sends is not worth reading

    @property
    def body(self) -> Error:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return Error(Problem(self.message, kind, self.param, self.code))


def refused(error: CrelleError, retry_after: int) -> ApiError:
    """Say to a client what the engine or the tokenizer says of its request."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(retry_after)})
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), param="prompt", code="context_length_exceeded")
    return ApiError(400, str(error), code="invalid_value")


def unavailable(why: str) -> ApiError:
    """Answer while the server shuts down, or when its engine has died."""
    return ApiError(503, why, code="unavailable", headers={"Retry-After": "5"}, close=True)


def failed(request_id: str) -> ApiError:
    """Answer where something of ours broke. What it was stands in the log, not here."""
    why = f"internal error in this request ({request_id}); other requests are not affected"
    return ApiError(500, why, code="internal_error")


def of_engine(error: BaseException, request_id: str) -> ApiError:
    """Answer where the engine ended a request with an error. The same request would end so again."""
    if isinstance(error, SchemeError | CapacityError):  # a grammar that takes too much work, no token that is allowed
        return ApiError(400, str(error), code="invalid_value")
    if not isinstance(error, NumericsError):
        return failed(request_id)
    why = (
        f"the model produced NaN or infinity for this request ({request_id}): the "
        "checkpoint or a kernel is faulty; see the log of the server"
    )
    return ApiError(500, why, code="non_finite_logits", headers={"x-should-retry": "false"})


def timed_out(seconds: float, tokens: int) -> ApiError:
    """Answer where a request took too long; trying the same again would take as long."""
    why = f"the request timed out after {seconds:g} s and {tokens} sampled tokens; request fewer tokens, or stream"
    return ApiError(504, why, code="timeout", headers={"x-should-retry": "false"})
