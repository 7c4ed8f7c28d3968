"""Takes the pictures of the site in a headless Chromium: `make docs`, then `python docs/site/screenshots.py`.

A page that asks another host for anything is an error. Pictures are reduced to 64 colours, which keeps them small.
"""

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "server" / "playground"))
from chromium import ARGUMENTS, chromium, environment  # noqa: E402

SITE = ROOT / "build" / "docs" / "site"
SIZES = {"desktop": (1280, 800), "phone": (390, 780)}
PAGES = {"desktop": "guide/first-model/", "phone": "notes/formats/"}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


def take(browser: Browser, root: str, name: str, colours: str) -> None:
    width, height = SIZES[name]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=colours)  # type: ignore[arg-type]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(root + PAGES[name], wait_until="networkidle")
    page.add_style_tag(content="::-webkit-scrollbar { display: none }")  # headless, it would be an empty stripe
    wide = page.evaluate("document.documentElement.scrollWidth")
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    to = ROOT / "docs" / "images" / f"site-{name}-{colours}.png"
    picture.quantize(64, dither=Image.Dither.NONE).save(to, optimize=True)
    page.close()
    if elsewhere := [url for url in asked if not url.startswith((root, "data:"))]:
        sys.exit(f"the site asks for {', '.join(elsewhere)}")
    if wide > width:
        sys.exit(f"{PAGES[name]} is {wide} pixels wide on a screen of {width}")


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    Thread(target=server.serve_forever, daemon=True).start()
    program = chromium()
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=program, args=ARGUMENTS, env=dict(environment(program)))
        for name in SIZES:
            for colours in ("light", "dark"):
                take(browser, f"http://127.0.0.1:{server.server_port}/", name, colours)
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    main()
