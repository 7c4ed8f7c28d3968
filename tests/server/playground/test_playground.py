"""The playground in a real browser: a headless Chromium reads the page from a server that says what the test gives it.

Every test also checks, when it ends, that the page asked nobody but its own server and that nothing went wrong in it.
"""

import json
import re
from typing import Any

import pytest
from browsing import ask, eventually, over, visit, watched
from fake_server import PAGE, FakeServer, content_security_policy
from playground_fixtures import empty_tab, page, server  # noqa: F401
from playwright.sync_api import Page, expect
from tiny_server import nested_llm, serving, slow_down

from crelle.server.settings import Keys

# ---- conversation


def test_answer_streams_into_the_page(page: Page, server: FakeServer) -> None:
    server.answer, server.pause = lambda body: "First second third fourth fifth.", 0.3
    visit(page, server.url)
    answer = ask(page, "Count, please")
    expect(page.locator(".asked")).to_have_text("Count, please")
    expect(answer.locator(".said")).to_contain_text("First")
    assert "fifth" not in answer.inner_text()  # it is shown while it comes
    expect(answer).to_have_attribute("aria-busy", "true")
    over(answer)
    expect(answer.locator(".said")).to_have_text("First second third fourth fifth.")
    expect(answer.locator(".facts")).to_contain_text(re.compile(r"5 tokens.*\d+\.\d tokens/s.*first after \d+\.\d+ s"))
    (body,) = server.requests
    assert body["model"] == "tiny"
    assert body["stream"] is True
    assert body["messages"] == [{"role": "user", "content": "Count, please"}]
    assert "precision" not in body


def test_conversation_and_settings_go_with_the_next_request(page: Page, server: FakeServer) -> None:
    visit(page, server.url)
    over(ask(page, "One"))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.2")
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("Stop at").fill("END\n###")
    page.get_by_label("Top p").fill("")
    expect(over(ask(page, "Two")).locator(".facts")).to_contain_text("reached max tokens")
    assert server.requests[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "An answer of several words."},
        {"role": "user", "content": "Two"},
    ]
    wanted = {"temperature": 0.2, "max_tokens": 3, "seed": 5, "stop": ["END", "###"]}
    assert {k: server.requests[1].get(k) for k in wanted} == wanted
    assert "top_p" not in server.requests[1]  # an empty field is left to the server
    assert "seed" not in server.requests[0]


def test_a_setting_out_of_range_is_not_sent(page: Page, server: FakeServer) -> None:
    visit(page, server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("0")
    page.get_by_role("button", name="Settings").click()
    page.locator("#prompt").fill("Hello")
    page.locator("#prompt").press("Enter")
    expect(page.get_by_label("Max tokens")).to_be_focused()
    assert server.requests == []
    expect(page.locator("#prompt")).to_have_value("Hello")


def test_json_mode_and_tools_are_asked_for_and_calls_are_shown(page: Page, server: FakeServer) -> None:
    visit(page, server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Answer as JSON").fill('{"type": "object"')
    page.locator("#prompt").fill("Hello")
    page.locator("#prompt").press("Enter")
    expect(page.get_by_label("Answer as JSON")).to_be_focused()
    assert server.requests == [], "what is no JSON is not sent"
    page.get_by_label("Answer as JSON").fill('{"type": "object"}')
    page.locator("#prompt").press("Enter")
    over(page.locator(".answer"))
    want = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert server.requests[0]["response_format"] == want
    tools = [{"type": "function", "function": {"name": "clock"}}]
    page.get_by_label("Answer as JSON").fill("{}")
    page.get_by_label("Tools").fill(json.dumps(tools))
    server.call, server.answer = ("clock", '{"zone": "UTC"}'), lambda body: ""
    answer = over(ask(page, "What time is it?"))
    expect(answer.locator("figure.code figcaption span")).to_have_text("clock")
    expect(answer.locator("figure.code code")).to_have_text('{"zone": "UTC"}')
    assert server.requests[1]["response_format"] == {"type": "json_object"}
    assert server.requests[1]["tools"] == tools
    over(ask(page, "It is noon."))
    assert "clock" in server.requests[2]["messages"][-2]["content"]


def test_text_mode_uses_completions(page: Page, server: FakeServer) -> None:
    server.answer = lambda body: "and they lived happily."
    visit(page, server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Mode").select_option("Continue a text")
    expect(over(ask(page, "Once upon a time")).locator(".said")).to_have_text("and they lived happily.")
    assert "/v1/chat/completions" not in server.paths
    assert server.requests[0]["prompt"] == "Once upon a time"
    assert "messages" not in server.requests[0]


def test_model_without_a_chat_template_opens_with_a_text_to_continue(page: Page, server: FakeServer) -> None:
    server.chats, server.answer = False, lambda body: "**Paris**\n\n- and # more"
    visit(page, server.url)
    expect(page.locator("#prompt")).to_have_attribute("placeholder", "Begin a text")
    answer = over(ask(page, "The capital of France is"))
    expect(answer.get_by_role("alert")).to_have_count(0)
    assert answer.locator(".said").text_content() == "**Paris**\n\n- and # more"  # a text is not Markdown
    assert server.requests[0]["prompt"] == "The capital of France is"
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Mode")).to_have_value("text")
    expect(page.locator("#mode option[value=chat]")).to_be_disabled()
    expect(page.locator("#no-chat")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Once upon a time").click()
    over(page.locator(".answer"))
    assert server.requests[1]["prompt"] == "Once upon a time"


def test_model_with_a_chat_template_opens_with_a_chat(page: Page, server: FakeServer) -> None:
    visit(page, server.url)
    expect(page.locator("#prompt")).to_have_attribute("placeholder", "Write a message")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Mode")).to_have_value("chat")
    expect(page.locator("#mode option[value=chat]")).to_be_enabled()
    expect(page.locator("#no-chat")).to_be_hidden()


@pytest.mark.parametrize("width", [320, 390, 1100])
def test_settings_can_be_closed_where_they_cover_the_page(page: Page, server: FakeServer, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 640})
    visit(page, server.url)
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("#settings")).to_be_visible()
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.get_by_role("button", name="Settings")).to_be_focused()
    over(ask(page, "Hello"))


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_answer_and_the_request(page: Page, server: FakeServer, how: str) -> None:
    server.answer, server.pause = lambda body: "word " * 400, 0.05
    visit(page, server.url)
    answer = ask(page, "Go on and on")
    expect(answer.locator(".said")).to_contain_text("word word")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    over(answer)
    expect(answer.locator(".facts")).to_contain_text("stopped")
    eventually(page, lambda: server.vanished == 1 and server.running == 0)
    server.answer, server.pause = lambda body: "Fine.", 0.0
    expect(over(ask(page, "And now?")).locator(".said")).to_have_text("Fine.")
    assert server.requests[1]["messages"][1]["content"].startswith("word word")  # what was said stays said


def test_new_chat_forgets(page: Page, server: FakeServer) -> None:
    visit(page, server.url)
    over(ask(page, "One"))
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    over(ask(page, "Two"))
    assert [m["content"] for m in server.requests[1]["messages"]] == ["Two"]


def test_events_and_characters_may_arrive_in_pieces(page: Page, server: FakeServer) -> None:
    said = "Naïve 日本語 🙂 “quoted”"
    server.answer, server.dribble = lambda body: said, True
    visit(page, server.url)
    expect(over(ask(page, "Speak")).locator(".said")).to_have_text(said)


def test_fenced_code_is_set_apart(page: Page, server: FakeServer) -> None:
    server.answer = lambda body: "Like this:\n\n```python\ndef f(x):\n    return x  # `x`\n```\n\nDone."
    visit(page, server.url)
    answer = over(ask(page, "Code"))
    assert answer.locator("pre code").text_content() == "def f(x):\n    return x  # `x`"
    expect(answer.locator("figcaption span")).to_have_text("python")
    assert answer.locator(".said").all_text_contents() == ["Like this:", "Done."]


def test_markdown_is_rendered(page: Page, server: FakeServer) -> None:
    said = (
        "# Lists\n\nTwo **kinds, `a` and b**:\nin lines\n\n* one `x*y` two\n  and more\n  - inner **bold**\n* last\n\n"
        "7. seven\n8) eight\n\n### Why?\nBecause 2 * 3 * 4 ** 5 and a_b_c and `unclosed"
    )
    server.answer = lambda body: said
    visit(page, server.url)
    answer = over(ask(page, "Markdown"))
    body = answer.locator(".body")
    tags = body.locator(":scope > *").evaluate_all("nodes => nodes.map(n => n.tagName)")
    assert tags == ["H4", "P", "DIV", "H6", "P"]
    assert body.locator(".title").all_text_contents() == ["Lists", "Why?"]
    assert body.locator(".said").all_text_contents() == [
        "Two kinds, a and b:\nin lines",
        "Because 2 * 3 * 4 ** 5 and a_b_c and `unclosed",
    ]
    assert body.locator("strong").all_text_contents() == ["kinds, a and b", "bold"]
    assert body.locator("code").all_text_contents() == ["a", "x*y"]
    assert body.locator(".list > ul > li").count() == 2
    assert body.locator(".list > ul > li > ul > li").all_text_contents() == ["inner bold"]
    assert body.locator(".list > ol > li").evaluate_all("nodes => nodes.map(n => n.value)") == [7, 8]


def test_markdown_that_streams_in_ends_as_if_it_had_come_at_once(page: Page, server: FakeServer) -> None:
    said = "## A title\n\n1. **first** item\n2. `second`\n\n```c\nint x;\n```\n- last\n\nEnd."
    server.answer = lambda body: said
    visit(page, server.url)
    at_once = over(ask(page, "All")).locator(".body").inner_html()
    server.pause = 0.03
    assert over(ask(page, "Slowly")).locator(".body").inner_html() == at_once


# ---- precisions


def test_one_precision_offers_no_choice(page: Page, server: FakeServer) -> None:
    server.precisions = (4,)
    visit(page, server.url)
    expect(page.locator("#gauges")).to_be_visible()
    expect(page.locator("#left")).to_be_hidden()
    expect(page.get_by_role("button", name="Side by side")).to_be_hidden()


def test_precision_picker_sends_the_field(page: Page, server: FakeServer) -> None:
    server.precisions = (2, 3, 4)
    visit(page, server.url)
    picker = page.get_by_role("group", name="Bits")
    expect(picker.get_by_label("4 bits")).to_be_checked()
    over(ask(page, "Best"))
    picker.get_by_label("2 bits").check()
    answer = over(ask(page, "Smallest"))
    expect(answer.get_by_role("heading")).to_have_text("2 bits")
    assert [r["precision"] for r in server.requests] == [4, 2]


def test_side_by_side_shows_two_answers(page: Page, server: FakeServer) -> None:
    server.precisions, server.answer = (2, 3, 4), lambda body: f"Said at {body['precision']}."
    visit(page, server.url)
    page.get_by_role("button", name="Side by side").click()
    page.get_by_role("group", name="Right bits").get_by_label("3 bits").check()
    answers = ask(page, "Both")
    expect(answers).to_have_count(2)
    for i, bits in enumerate((4, 3)):
        expect(over(answers.nth(i)).locator(".said")).to_have_text(f"Said at {bits}.")
        expect(answers.nth(i).get_by_role("heading")).to_have_text(f"{bits} bits")
    left, right = (answers.nth(i).bounding_box() for i in (0, 1))
    assert left is not None
    assert right is not None
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] < right["x"]
    ask(page, "More")
    over(page.locator(".turn").last.locator(".answer").last)
    eventually(page, lambda: len(server.requests) == 4)
    for body in server.requests[2:]:  # each column goes on with what it said itself
        assert body["messages"][1]["content"] == f"Said at {body['precision']}."


# ---- what can go wrong


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
    return status, {"error": {"message": message}}, headers or {}


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (refusal(400, "top_p must be above 0, not 0"), "top_p must be above 0, not 0."),
        (refusal(429, "the queue is full", {"Retry-After": "3"}), "The queue is full. Try again in 3 s."),
        ((503, "", {}), "The server is busy. Try again in a moment."),
        ((500, "<h1>Bad gateway</h1>", {}), "The server answered with status 500."),
    ],
)
def test_refusal_is_shown_as_a_sentence(page: Page, server: FakeServer, failure: Any, sentence: str) -> None:
    server.failure = failure
    visit(page, server.url)
    answer = over(ask(page, "Hello"))
    expect(answer.get_by_role("alert")).to_have_text(sentence)
    server.failure = None
    answer.get_by_role("button", name="Try again").click()
    expect(page.locator(".turn")).to_have_count(1)
    expect(over(page.locator(".answer")).locator(".said")).to_have_text("An answer of several words.")
    assert [m["content"] for m in server.requests[1]["messages"]] == ["Hello"]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("error_after", "The model ran out of pages."), ("break_after", "The answer broke off before it was complete.")],
)
def test_fault_in_mid_stream_keeps_what_was_said(page: Page, server: FakeServer, fault: str, sentence: str) -> None:
    setattr(server, fault, 2)
    visit(page, server.url)
    answer = over(ask(page, "Hello"))
    expect(answer.get_by_role("alert")).to_have_text(sentence)
    expect(answer.locator(".said")).to_have_text("An answer")


def test_server_that_is_gone_is_said_and_found_again(page: Page, server: FakeServer) -> None:
    visit(page, server.url)
    page.context.set_offline(True)
    sentence = "The server cannot be reached. Is it running?"
    expect(page.locator("#notice")).to_have_text(sentence)
    expect(over(ask(page, "Hello")).get_by_role("alert")).to_have_text(sentence)
    page.context.set_offline(False)
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#gauges")).to_be_visible()


def test_api_key_is_asked_for_and_kept_in_the_tab(page: Page, server: FakeServer) -> None:
    server.api_key = "s3cret"
    page.goto(server.url)
    expect(page.locator("#notice")).to_have_text("This server needs an API key. Enter it in the settings.")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("API key").fill("wrong")
    expect(page.locator("#notice")).to_have_text("The server does not accept the API key in the settings.")
    page.get_by_label("API key").fill("s3cret")
    expect(page.locator("#notice")).to_be_hidden()
    over(ask(page, "Hello"))
    assert server.headers[-1]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in page.evaluate("JSON.stringify({...localStorage}) + document.cookie + location.href")
    page.reload()
    expect(page.locator("#model")).to_have_text("tiny")  # the tab still knows it


def test_markup_from_the_model_stays_text(page: Page, server: FakeServer) -> None:
    evil = "<img src=x onerror='hacked=1'><script>hacked=2</script><b>bold</b> &amp; <a href=javascript:hacked=4>x</a>"
    rich = f"# {evil}\n- **{evil}**\n\n"
    server.answer = lambda body: f"{rich}{evil}\n```<svg/onload=hacked=3>\n{evil}\n```"
    server.precisions = (2, 4)
    visit(page, server.url)
    answer = over(ask(page, evil))
    expect(answer.locator(".said")).to_have_text(evil)
    expect(answer.locator(".title")).to_have_text(evil)
    expect(answer.locator("li strong")).to_have_text(evil)
    assert answer.locator("pre code").text_content() == evil
    expect(page.locator(".asked")).to_have_text(evil)
    server.failure = refusal(400, evil)
    expect(over(ask(page, "again")).get_by_role("alert")).to_contain_text("<img src=x")
    assert page.locator("#log :is(img, script, b, a, svg)").count() == 0
    assert page.evaluate("window.hacked") is None


def test_page_names_no_other_place_and_fits_a_strict_policy() -> None:
    html = PAGE.read_text()
    assert not re.search(r"https?:|//[a-z]|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", html)
    assert not re.search(r"<[^>]+\s(on\w+|style)=", html.split("<script>")[0])
    assert "unsafe" not in content_security_policy(html)


# ---- gauges


def test_gauges_follow_the_server_while_the_page_is_seen(page: Page, server: FakeServer) -> None:
    server.answer, server.pause = lambda body: "word " * 400, 0.05
    visit(page, server.url)
    expect(page.locator("#speed")).to_have_text("0.0")
    meter = page.get_by_role("meter", name="KV cache, 4 bits")
    expect(meter).to_have_attribute("aria-valuenow", "640")
    ask(page, "Go on")
    expect(page.locator("#speed")).to_have_text(re.compile(r"61\.[23]"))
    expect(page.locator("#kv-text")).to_have_text("1,120 of 8,192 tokens")
    expect(meter).to_have_attribute("aria-valuetext", "1,120 of 8,192 tokens")
    expect(page.locator("#load")).to_have_text("1 running")
    page.keyboard.press("Escape")
    expect(page.locator("#speed")).to_have_text("0.0")

    def see(hidden: bool) -> None:
        page.evaluate(
            f"Object.defineProperty(document, 'hidden', {{value: {str(hidden).lower()}, configurable: true}})"
        )
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    see(False)
    before = server.paths.count("/v1/status")
    page.wait_for_timeout(2600)
    assert 1 <= server.paths.count("/v1/status") - before <= 4
    see(True)
    page.wait_for_timeout(500)  # one may be under way
    before = server.paths.count("/v1/status")
    page.wait_for_timeout(2200)
    assert server.paths.count("/v1/status") == before
    see(False)
    eventually(page, lambda: server.paths.count("/v1/status") > before)


# ---- the real server


def test_real_server_serves_the_page_and_answers_it(empty_tab: Page) -> None:
    with serving(nested_llm(), keys=Keys.of("s3cret")) as real, watched(empty_tab, real.url) as page:
        slow_down(real.engine, 0.01)
        page.goto(real.url)
        expect(page.locator("#notice")).to_have_text("This server needs an API key. Enter it in the settings.")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("API key").fill("s3cret")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max tokens").fill("40")
        expect(page.locator("#model")).to_have_text("tiny")
        page.get_by_role("button", name="Side by side").click()
        answers = ask(page, "Hello")
        for i, bits in enumerate((4, 2)):
            expect(over(answers.nth(i)).get_by_role("heading")).to_have_text(f"{bits} bits")
            expect(answers.nth(i).locator(".facts")).to_contain_text("40 tokens")
        page.get_by_label("Max tokens").fill("1900")
        answers = ask(page, "On and on")
        expect(page.locator("#load")).to_have_text("2 running")
        page.keyboard.press("Escape")
        expect(over(answers.first).locator(".facts")).to_contain_text("stopped")
        page.get_by_label("Max tokens").fill("100000")
        expect(over(ask(page, "Too much").first).get_by_role("alert")).to_contain_text("max_tokens")
        real.assert_empty()
