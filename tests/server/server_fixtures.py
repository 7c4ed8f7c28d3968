"""Fixtures that several test files of the server import by name: a tiny nested model, and servers of it."""

from collections.abc import Iterator

import pytest
from tiny_server import Running, nested_llm, serving

from crelle import LLM, Sampling


@pytest.fixture(scope="module")
def llm() -> LLM:
    return nested_llm()


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    """A server with default settings; nothing may be left in its engine at the end."""
    with serving(llm) as found:
        yield found
        found.assert_empty()


@pytest.fixture(scope="module")
def limited_server(llm: LLM) -> Iterator[Running]:
    """A server that takes small bodies, which must come within a second."""
    with serving(llm, max_body=20_000, body_timeout=1.0) as found:
        yield found


@pytest.fixture(scope="module")
def want() -> str:
    """What GREEDY is answered with by the model alone."""
    return nested_llm("alone").generate("Hello", Sampling(max_tokens=12)).text
