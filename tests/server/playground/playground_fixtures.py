"""Fixtures of the playground's tests: a browser, a server that says what the test gives it, and a tab on it."""

from collections.abc import Iterator

import pytest
from browsing import launched, tab, watched
from fake_server import FakeServer
from playwright.sync_api import Page


@pytest.fixture(scope="module")
def empty_tab() -> Iterator[Page]:
    with launched() as browser:
        yield tab(browser)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def page(empty_tab: Page, server: FakeServer) -> Iterator[Page]:
    with watched(empty_tab, server.url) as page:
        yield page
