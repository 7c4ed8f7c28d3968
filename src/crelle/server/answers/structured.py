"""What the form of an answer must be, from the parameters of OpenAI and of vLLM, old and new."""

from typing import Any

from crelle.engine.sampling.grammar import GrammarSpec, one_of
from crelle.errors import CrelleError
from crelle.server.answers.tool_formats import json_grammar
from crelle.server.errors import ApiError
from crelle.server.schema.schemas import Generate
from crelle.server.schema.strict_json import dumps
from crelle.server.schema.tool_schemas import JsonFormat, JsonSchemaFormat

_ANY_OBJECT = {"type": "object"}


class Form:
    """What one parameter asks for."""

    def __init__(self, param: str, kind: str, value: Any) -> None:
        self.param, self._kind, self._value = param, kind, value

    def grammar(self, thinks: bool | None = None) -> GrammarSpec:
        """Return it as a grammar; thinks: see `crelle.server.answers.chat_answer.thinks`."""
        value = self._value
        try:
            if self._kind == "json":
                return json_grammar(value if isinstance(value, str) else dumps(value), thinks)
            if self._kind == "choice":
                return one_of(value)
            return GrammarSpec("regex" if self._kind == "regex" else "grammar", value)
        except CrelleError as e:
            raise ApiError(400, str(e), param=self.param, code="invalid_value") from None


def form_of(asked: Generate) -> Form | None:
    """Return the form that a request asks for, or say that it asks for several."""
    found = [Form(*one) for one in _wishes(asked) if one[2] is not None]
    if len(found) > 1:
        why = f"{found[0].param} and {found[1].param} both set the form of the answer; send one of them"
        raise ApiError(400, why, param=found[1].param, code="invalid_value")
    return found[0] if found else None


def _wishes(asked: Generate) -> list[tuple[str, str, Any]]:
    f, s = asked.response_format, asked.structured_outputs
    wishes = [(f"guided_{kind}", kind, getattr(asked, f"guided_{kind}")) for kind in _KINDS]
    if isinstance(f, JsonFormat):
        wishes.append(("response_format", "json", _ANY_OBJECT))
    if isinstance(f, JsonSchemaFormat):
        schema = f.json_schema.schema
        wishes.append(("response_format", "json", _ANY_OBJECT if schema is None else schema))
    if s is not None:
        wishes += [(f"structured_outputs.{kind}", kind, getattr(s, kind)) for kind in _KINDS]
        wishes.append(("structured_outputs.json_object", "json", _ANY_OBJECT if s.json_object else None))
    return wishes


_KINDS = ("json", "regex", "choice", "grammar")
