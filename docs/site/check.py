"""What must hold of the built site: links lead somewhere, Markdown is rendered, nothing comes from another host."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
RAW = re.compile(r"^\||\n\s*(?:\||[-*] |\d+\. )")  # a table or a list that was taken for text
STYLED = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.paragraphs: list[str] = []
        self._inside = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "p" or (self._inside and tag in ("a", "code", "strong", "em"))
        if tag == "p":
            self.paragraphs.append("")
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given[LOADED[tag]])
        self.loaded += (found[0] or found[1] for found in STYLED.findall(given.get("style", "")))

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.paragraphs[-1] += data


def faults(site: Path) -> list[str]:
    """Return what is wrong with the site, a sentence each."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html")) if "files" not in path.parts}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name}: loads {url} from elsewhere" for url in page.loaded if _foreign(url)]
        found += [f"{name}: '{p.strip()[:60]}' was not rendered" for p in page.paragraphs if RAW.search(p)]
        if name.as_posix() != "404.html":  # it is shown at any address, so its links begin at the root
            links = (link for link in page.links + page.loaded if not _foreign(link))
            found += [f"{name}: {link} leads nowhere" for link in links if not _leads(link, path, pages)]
    for sheet in site.rglob("*.css"):
        urls = (a or b for a, b in STYLED.findall(sheet.read_text(encoding="utf-8")))
        found += [f"{sheet.relative_to(site)}: loads {url} from elsewhere" for url in urls if _foreign(url)]
    return found


def _foreign(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def _leads(link: str, path: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme == "data" or link == "#":
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return False
    return not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].ids
