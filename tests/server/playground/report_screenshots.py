"""Takes the pictures of docs/guide/report.md: python tests/server/playground/report_screenshots.py REPORT.html"""

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

from browsing import launched
from PIL import Image

IMAGES = Path(__file__).parents[3] / "docs" / "images"
PHONE, DESKTOP = (390, 844), (1280, 900)
PICTURES = (  # name, window, colours, where the picture begins
    ("desktop-light", DESKTOP, "light", "h1"),
    ("desktop-dark", DESKTOP, "dark", "#throughput"),
    ("phone-light", PHONE, "light", "#perplexity-smollm2-135m-wikitext-2"),
    ("phone-dark", PHONE, "dark", "#latency-nvidia-h200-12288x12288"),
)


def main(report: Path) -> None:
    with launched() as browser:
        for name, (width, height), scheme, place in PICTURES:
            window: Any = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
            page = browser.new_page(**window, device_scale_factor=1.5 if width > 390 else 2)
            page.goto(report.resolve().as_uri())
            page.locator(place).evaluate("e => e.scrollIntoView()")
            picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
            picture.quantize(160, dither=Image.Dither.NONE).save(IMAGES / f"report-{name}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
