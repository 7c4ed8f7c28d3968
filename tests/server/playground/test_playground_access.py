"""The playground for everyone: by keyboard alone, to a screen reader, in both colours, at every width."""

from itertools import pairwise
from typing import Any

import pytest
from browsing import ask, eventually, over, visit
from fake_server import FakeServer
from playground_fixtures import empty_tab, page, server  # noqa: F401
from playwright.sync_api import Page, expect


def test_everything_can_be_done_by_keyboard(page: Page, server: FakeServer) -> None:
    server.precisions = (2, 3, 4)
    visit(page, server.url)
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("Two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    over(page.locator(".answer"))
    assert server.requests[0]["messages"][0]["content"] == "Two\nlines"
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Tab")  # the picker: arrows choose
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")  # side by side
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("Both")
    page.keyboard.press("Enter")
    eventually(page, lambda: len(server.requests) == 3)
    assert sorted(r["precision"] for r in server.requests[1:]) == [3, 3]
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Mode")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.get_by_role("button", name="Settings")).to_be_focused()


FOCUS = """() => {
    const e = document.activeElement;
    const outlined = (n) => {
        const style = getComputedStyle(n);
        return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
    };
    const box = e.closest(".box:has(textarea:focus)");
    const seen = outlined(e) || (e.type === "radio" && outlined(e.nextElementSibling));
    return [e.id || e.name || e.textContent || e.tagName, seen || (box && getComputedStyle(box).boxShadow !== "none")];
}"""


def test_focus_is_seen_at_every_stop(page: Page, server: FakeServer) -> None:
    server.precisions = (2, 4)
    visit(page, server.url)
    over(ask(page, "Hello"))
    page.get_by_role("button", name="Settings").click()
    page.locator("#prompt").focus()
    stops: dict[str, bool] = {}
    for _ in range(40):
        page.keyboard.press("Tab")
        name, seen = page.evaluate(FOCUS)
        if name != "BODY" and page.evaluate("document.activeElement !== document.body"):
            stops[name] = seen
    assert {"new", "panel", "theme", "log", "Copy", "prompt", "left", "compare", "go", "mode", "seed", "key"} <= set(
        stops
    )
    assert [name for name, seen in stops.items() if not seen] == []


def test_screen_readers_hear_whole_answers(page: Page, server: FakeServer) -> None:
    server.pause = 0.1
    visit(page, server.url)
    log = page.get_by_role("log", name="Conversation")
    expect(log).to_have_attribute("aria-live", "polite")
    answer = ask(page, "Hello")
    expect(log.get_by_role("article", name="Answer")).to_have_attribute("aria-busy", "true")
    expect(page.get_by_role("status")).to_have_text("Answering.")
    over(answer)
    expect(page.get_by_role("status")).to_have_text("Answer complete.")
    page.get_by_role("button", name="Settings").click()
    unnamed = (
        "[...document.querySelectorAll('input, textarea, select')].filter((e) => !e.labels.length && !e.ariaLabel)"
    )
    assert page.evaluate(f"{unnamed}.length") == 0


CONTRAST = """(selector) => {
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const luminance = (colour) => {
        const [r, g, b] = numbers(colour).map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const e = document.querySelector(selector);
    let behind = e;
    while (numbers(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const ratio = luminance(getComputedStyle(e).color) / luminance(getComputedStyle(behind).backgroundColor);
    return Math.max(ratio, 1 / ratio);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(page: Page, server: FakeServer, scheme: Any) -> None:
    server.precisions, server.failure = (2, 4), (400, {"error": {"message": "no"}}, {})
    page.emulate_media(color_scheme=scheme)
    visit(page, server.url)
    lightness = (
        "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b) / 765"
    )

    def is_dark() -> bool:
        return bool(page.evaluate(lightness) < 0.5)

    assert is_dark() == (scheme == "dark")
    over(ask(page, "Hello"))
    page.get_by_role("button", name="Settings").click()
    texts = (
        "body",
        "#model",
        ".asked",
        ".answer h3",
        ".error",
        ".facts .quiet",
        "#go",
        "#hint",
        "#left span",
        "aside label",
    )
    for _ in range(2):
        assert {t: c for t in texts if (c := page.evaluate(CONTRAST, t)) < 4.5} == {}
        page.get_by_role("button", name="colours").click()
        assert is_dark() != (scheme == "dark")
        scheme = "light" if scheme == "dark" else "dark"
    page.get_by_role("button", name="colours").click()
    chosen = is_dark()
    page.reload()
    assert is_dark() == chosen  # and it is remembered


@pytest.mark.parametrize("width", [320, 390, 800, 1600])
def test_page_fits_every_width(page: Page, server: FakeServer, width: int) -> None:
    server.precisions, server.answer = (2, 3, 4), lambda body: "A" * 300 + "\n```\n" + "x" * 300 + "\n```"
    page.set_viewport_size({"width": width, "height": 640})
    visit(page, server.url)
    page.get_by_role("button", name="Side by side").click()
    answers = ask(page, "word " * 60)
    over(answers.first)
    over(answers.last)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.getElementById('log').scrollWidth <= document.getElementById('log').clientWidth")
    for name in ("#prompt", "#go", "#panel", "#theme"):
        box = page.locator(name).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= 640
    tops = [b["y"] for i in (0, 1) if (b := answers.nth(i).bounding_box())]
    assert all(a < b for a, b in pairwise(tops)) == (width <= 640)  # one below the other where it is narrow
