"""Chat templates, rendered with limits: a template comes with a model, so it is untrusted input.

The text is the one that transformers gives: Jinja in its immutable sandbox, with `tojson`, `raise_exception`,
`strftime_now`, `{% generation %}` and loop controls. On top of the sandbox, which keeps a template from Python's
internals, a budget keeps it from running for ever and from filling the memory:

    steps     an iteration, a call, an operator or an entry of a list that is made is a step, of which there are
              2,000,000, within half a second of CPU time
    bytes     every string that is made is counted before it is made, 256 MB in all
    output    2^20 characters and 8 times those of the conversation

Loops are counted by nodes that are put into the template's syntax tree, lists and strings where they arise: displays,
slices, `~`, operators, filters, methods and blocks. Values that are built from each other can be exponentially large
only when they are printed or compared, so a list counts with all that is below it, as often as it is there.
"""

# ruff: noqa: N802, N815  (Jinja's visitors are named after its nodes)

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from crelle.engine.tokenization.template_budget import (
    ESTIMATES,
    MAX_BITS,
    Budget,
    TemplateLimitError,
    current,
    formatted,
    guarded,
    joined,
    kept,
    printed,
    raise_exception,
    strftime_now,
    tick,
    to_json,
)
from crelle.errors import UnsupportedError

MAX_SOURCE = 1 << 16  # characters of a template; the longest real ones have some 30,000
_MAX_BLOCKS = 40  # of a template, one in another
_NOT_IN_CHATS = {"filesizeformat", "forceescape", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr"}
_METHODS: dict[type, str] = {  # what may be asked of a value; all others are refused
    str: "capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit "
    "islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace "
    "rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill",
    dict: "get items keys values copy",
    list: "copy count index",
    tuple: "count index",
    range: "start stop step count index",
    int: "real imag bit_length",
    float: "real imag is_integer",
}
_ALLOWED = {kind: frozenset(names.split()) for kind, names in _METHODS.items()}


@pass_context  # the context itself is not needed; a function that wants it is not called while compiling
def _finalize(_: Context, value: Any) -> Any:
    if not isinstance(value, str):
        budget = current.get()
        budget.reserve(4 * budget.size(value))
    return value


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said; the text is the same without it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None).set_lineno(line)  # type: ignore[return-value]


class _Counting(NodeTransformer):
    """Puts the counting into a template's syntax tree."""

    _depth = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Compiling takes time with the square of the depth and more."""
        inside = isinstance(node, nodes.Stmt)
        self._depth += inside
        if self._depth > _MAX_BLOCKS:
            raise TemplateLimitError(f"nests more than {_MAX_BLOCKS} blocks")
        try:
            return super().visit(node, *args, **kwargs)
        finally:
            self._depth -= inside

    def _body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [], node.lineno)).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = _body

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._body(node)
        if node.test is not None:
            node.test = nodes.And(_call("tick", [], node.lineno), node.test).set_lineno(node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("printed", [nodes.List(node.nodes).set_lineno(node.lineno)], node.lineno)  # type: ignore[list-item]

    def _display(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(isinstance(c, nodes.Const) for c in node.iter_child_nodes()):
            return node  # type: ignore[no-any-return]
        return _call("kept", [node], node.lineno)

    visit_List = visit_Tuple = visit_Dict = _display

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("kept", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = printed = staticmethod(printed)  # `concat` joins the output of blocks and macros
    tick, kept = staticmethod(tick), staticmethod(kept)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_finalize,
            optimized=False,  # nothing is computed while the template is compiled
        )
        self.filters = {n: guarded(n, f) for n, f in self.filters.items() if n not in _NOT_IN_CHATS}
        tests: dict[str, Any] = self.tests
        self.tests = {n: guarded(n, f) for n, f in tests.items()}
        self.filters["tojson"] = guarded("tojson", to_json)
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Counting().visit(template)
        return template.set_environment(self)  # type: ignore[return-value]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = next((names for kind, names in _ALLOWED.items() if isinstance(obj, kind)), None)
        return (allowed is None or attr in allowed) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        made = super().wrap_str_format(value)
        if made is None:
            return None
        pattern, fill = value.__self__, made

        def format_counted(*args: Any, **kwargs: Any) -> str:
            current.get().reserve(4 * formatted(pattern, *args, **kwargs))
            return fill(*args, **kwargs)

        return format_counted

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = current.get()
        budget.step()
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            if __obj.__name__ == "join" and len(args) == 1:
                args = (list(args[0]),)
                budget.reserve(4 * joined(args[0], __obj.__self__))
            elif (estimate := ESTIMATES.get(__obj.__name__)) is not None:
                budget.reserve(4 * estimate(__obj.__self__, *args, **kwargs))
        made = super().call(__context, __obj, *args, **kwargs)
        return made if __obj in (tick, kept, printed) else budget.keep(made)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current.get()
        budget.step()
        if operator == "%" and isinstance(left, str):
            budget.reserve(4 * formatted(left, *(right if isinstance(right, tuple) else (right,))))
        elif operator in "**" and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
            if bits > MAX_BITS:
                raise TemplateLimitError("makes an enormous integer")
        elif operator == "*":
            many, once = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(many, int) and isinstance(once, str | list | tuple):
                budget.reserve(max(0, many) * max(1, len(once)) * (4 if isinstance(once, str) else 8))
        return budget.keep(_OPERATORS[operator](left, right))


_OPERATORS = {"+": operator.add, "*": operator.mul, "**": operator.pow, "%": operator.mod}


class ChatTemplate:
    """A model's chat template, compiled when it is first used."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise UnsupportedError(
                f"the model's chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are allowed"
            )
        self.source = source

    @cached_property
    def _template(self) -> Any:
        return _Environment().from_string(self.source)

    def render(self, messages: list[Any], special: Mapping[str, str], tools: Sequence[Any] = (), **options: Any) -> str:
        """Return a conversation as text, up to where the assistant's answer begins."""
        with _Speaking():
            template = self._template
        budget = Budget()
        token = current.set(budget)
        try:
            with _Speaking():
                limit = (1 << 20) + 8 * (budget.size(messages) + budget.size(list(tools)))
                given = {**options, **special, "messages": messages, "tools": list(tools) or None, "documents": None}
                context = template.new_context({**given, "add_generation_prompt": True})
                return printed(_up_to(limit, template.root_render_func(context)))
        finally:
            current.reset(token)


def _up_to(limit: int, chunks: Iterable[str]) -> Iterator[str]:
    for chunk in chunks:
        limit -= len(chunk)
        if limit < 0:
            raise TemplateLimitError("writes far more text than the conversation contains")
        yield chunk


class _Speaking:
    """Reports any error of a template in a sentence."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, _: object) -> None:
        if isinstance(e, TemplateLimitError):
            raise UnsupportedError(f"the model's chat template {e}, so it was stopped") from e
        if isinstance(e, TemplateError):
            raise UnsupportedError(f"the model's chat template rejects this conversation: {e}") from e
        if isinstance(e, RecursionError):
            raise UnsupportedError("the model's chat template recurses without end") from e
        if isinstance(e, Exception):
            raise UnsupportedError(f"the model's chat template fails on this conversation: {e}") from e
