"""SVG by few words: text, boxes, rows of cells. Colours are classes: a picture follows the reader's light or dark."""

from html import escape

LIGHT = {"back": "#ffffff", "ink": "#222222", "soft": "#5c6066", "line": "#9aa0a8", "pale": "#f3f4f6"}
DARK = {"back": "#1e2129", "ink": "#e8e8ea", "soft": "#a9adb6", "line": "#6d737d", "pale": "#2a2e38"}
HUES = {
    "a": ("#1f5fa8", "#79aef0"),
    "b": ("#4f8fd0", "#5b8fd0"),
    "c": ("#9cc3ea", "#3f5f88"),
    "red": ("#c0392b", "#ff8a75"),
}
HUES |= {"green": ("#2e7d4f", "#63c08a")}  # light, dark
ON = {"a": ("#ffffff", "#14161b"), "b": ("#ffffff", "#14161b"), "c": ("#222222", "#e8e8ea")}  # text on a filled cell
ON |= {"red": ("#ffffff", "#14161b"), "green": ("#ffffff", "#14161b")}


def _style(dark: bool) -> str:
    shades = DARK if dark else LIGHT
    rules = ["text{white-space:pre}"] * (not dark) + [
        f".{name}{{fill:{shades[name]}}}" for name in ("back", "ink", "soft", "pale")
    ]
    rules.append(f".line{{stroke:{shades['line']};fill:none}}.boxed{{stroke:{shades['line']};fill:{shades['pale']}}}")
    for name, pair in HUES.items():
        rules.append(f".{name}{{fill:{pair[dark]}}}.s-{name}{{stroke:{pair[dark]};fill:none}}")
        rules.append(f".f-{name}{{fill:{pair[dark]};stroke:{pair[dark]}}}.on-{name}{{fill:{ON[name][dark]}}}")
    return "".join(rules)


class Drawing:
    """Collects shapes; `svg()` is the file. Without a colour, text has that of ink."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "ink", *, size: int = 13, bold: bool = False) -> None:
        self._text(x, y, words, kind, size, "bold" if bold else "", "start")

    def middle(self, x: float, y: float, words: str, kind: str = "ink", *, size: int = 13, bold: bool = False) -> None:
        self._text(x, y, words, kind, size, "bold" if bold else "", "middle")

    def _text(self, x: float, y: float, words: str, kind: str, size: int, weight: str, anchor: str) -> None:
        style = f' font-size="{size}"' * (size != 13) + f' font-weight="{weight}"' * bool(weight)
        style += f' text-anchor="{anchor}"' * (anchor != "start")
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}"{style}>{escape(words)}</text>')

    def box(self, x: float, y: float, w: float, h: float, kind: str = "boxed", *, round_: int = 0) -> None:
        corner = f' rx="{round_}"' * bool(round_)
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"{corner} class="{kind}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line", *, arrow: bool = False) -> None:
        end = ' marker-end="url(#arrow)"' * arrow
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}"{end}/>')

    def cell(self, x: float, y: float, words: str, hue: str, *, filled: bool, size: int = 31, font: int = 13) -> None:
        self.box(x, y, size, size, f"f-{hue}" if filled else f"s-{hue}")
        kind = f"on-{hue}" if filled else "ink"
        self.middle(x + size / 2, y + size / 2 + font * 0.37, words, kind, size=font)

    def svg(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
        head += f'font-family="sans-serif" font-size="13" role="img"><title>{escape(self.title)}</title>'
        style = f"<style>{_style(False)}@media(prefers-color-scheme:dark){{{_style(True)}}}</style>"
        arrow = '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        arrow += 'orient="auto"><path d="M0 0L8 4L0 8z" class="soft"/></marker></defs>'
        back = '<rect width="100%" height="100%" rx="6" class="back"/>'
        return "\n".join([head, style, arrow, back, *self.parts, "</svg>"]) + "\n"
