"""Fixtures of the playground's tests: a browser, a server that says what the test gives it, and a tab on it."""

from collections.abc import Iterator

import pytest
from browsing import launched, watched
from fake_server import FakeServer
from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: FakeServer) -> Iterator[Page]:
    with watched(browser, server.url) as page:
        yield page
