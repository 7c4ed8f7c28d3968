"""Takes the pictures of docs/guide/playground.md from a server that runs.

    python tests/server/playground/screenshots.py URL

The model should be a nested checkpoint. Pictures are reduced to 128 colours, which keeps them small.
"""

import sys
from io import BytesIO
from pathlib import Path

from browsing import ask, launched, over
from PIL import Image
from playwright.sync_api import Page, expect

IMAGES = Path(__file__).parents[3] / "docs" / "images"


def take(page: Page, name: str) -> None:
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(IMAGES / f"playground-{name}.png", optimize=True)


def main(url: str) -> None:
    with launched() as browser:
        page = browser.new_page(viewport={"width": 1130, "height": 640}, device_scale_factor=1.5, color_scheme="light")
        page.goto(url)
        expect(page.locator("#left")).to_be_visible()
        page.evaluate("() => { for (const [id, v] of [['temperature', 0], ['max_tokens', 80]]) $(id).value = v; }")
        answer = ask(page, "What is gravity?")
        page.wait_for_function("() => turns.at(-1).answers[0].pieces >= 50")
        take(page, "light")
        over(answer.first)
        page.get_by_role("button", name="New chat").click()
        page.get_by_role("button", name="Side by side").click()
        page.get_by_role("group", name="Right bits").get_by_label("3 bits").check()
        answers = ask(page, "Why is the sky blue?")
        over(answers.first)
        over(answers.last)
        take(page, "side-by-side")
        page.emulate_media(color_scheme="dark")
        page.get_by_role("button", name="Side by side").click()
        page.get_by_role("button", name="New chat").click()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Max tokens").fill("40")
        over(ask(page, "Write a hello world program in Python.").first)
        take(page, "dark")


if __name__ == "__main__":
    main(sys.argv[1])
