"""A real browser on the playground, and the moves of a person in front of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from chromium import ARGUMENTS, chromium, environment
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright

from crelle.errors import CrelleError

_PATIENCE = 20_000  # milliseconds: machines under load are slow
_VIEWPORT: Any = {"width": 1100, "height": 720}

expect.set_options(timeout=_PATIENCE)


@contextmanager
def launched() -> Iterator[Browser]:
    """Run a headless Chromium. Not for a whole session: Playwright keeps an event loop in this thread meanwhile."""
    try:
        program = chromium()
    except CrelleError as e:  # said loudly: make test lists what was skipped, and why
        pytest.skip(f"NO BROWSER, so pages are not tested: {e}")
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=program, args=ARGUMENTS, env=environment(program))
        yield browser
        browser.close()


def tab(browser: Browser) -> Page:
    """Open an empty tab. One does for many tests: starting the processes of another takes longer than most of them."""
    context = browser.new_context(viewport=_VIEWPORT, color_scheme="light")
    context.set_default_timeout(_PATIENCE)
    return context.new_page()


@contextmanager
def watched(page: Page, url: str) -> Iterator[Page]:
    """Check at the end that an empty tab asked no server but `url` and that nothing went wrong; make it empty again.

    Every server has a port and thus an origin of its own, so that what a page stores is not seen by the next one.
    """
    asked: list[str] = []
    wrong: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # a refusal is not a fault
            wrong.append(message.text)

    listeners: dict[Any, Any] = {
        "request": lambda request: asked.append(request.url),
        "console": hear,
        "weberror": lambda error: wrong.append(str(error.error)),
    }
    for event, listener in listeners.items():
        page.context.on(event, listener)
    try:
        yield page
    finally:
        page.context.set_offline(False)
        if page.url != "about:blank":
            page.evaluate("localStorage.clear(), sessionStorage.clear()")
        page.goto("about:blank")
        for event, listener in listeners.items():
            page.context.remove_listener(event, listener)
        page.set_viewport_size(_VIEWPORT)
        page.emulate_media(color_scheme="light")
    assert asked
    assert [u for u in asked if not u.startswith((url + "/", "data:"))] == []
    assert wrong == []


def visit(page: Page, url: str) -> None:
    """Open the playground and wait until it knows its server."""
    page.goto(url)
    expect(page.locator("#model")).to_have_text("tiny")


def ask(page: Page, text: str) -> Locator:
    """Send a message as people do and return the answers to it."""
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    return page.locator(".turn").last.locator(".answer")


def over(answer: Locator) -> Locator:
    """Wait for the end of an answer."""
    expect(answer).to_have_attribute("aria-busy", "false")
    return answer


def eventually(page: Page, true: Callable[[], bool]) -> None:
    """Wait for something outside of the page."""
    for _ in range(_PATIENCE // 50):
        if true():
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"it did not come true within {_PATIENCE // 1000} seconds")
