"""The report as one HTML page: no script, no font, no address of another machine. The same rows give the same bytes."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from crelle.bench.report.contents import Headline
from crelle.bench.report.figures import Figure, Section, slug
from crelle.bench.report.rows import LeftOut, Source
from crelle.bench.report.styles import Styles, styles
from crelle.bench.report.svg import draw
from crelle.version import __version__

_SHORT = 2  # sources that are shown under a figure; more are folded into a summary
_BEST, _LEFT_OUT = "Best of each kind", "Left out"


def page(title: str, lines: Sequence[Headline], parts: Sequence[Section], left_out: Sequence[LeftOut]) -> str:
    style = (Path(__file__).with_name("page.css")).read_text(encoding="utf-8")
    names = [part.title for part in parts] + [_BEST] * bool(lines) + [_LEFT_OUT] * bool(left_out)
    links = "".join(f'<a href="#{slug(name)}">{escape(name)}</a>' for name in names)
    looks = styles(figure for part in parts for figure in part.figures)
    body = "".join(_section(part, looks) for part in parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n"
        f'<p class="soft">{_extent(parts)} Drawn by crelle {escape(__version__)}. Figures of different machines are '
        "not comparable; each names its own. Every measured row is in the table below its chart.</p>\n"
        f"<nav>{links}</nav>\n{body}{_headline(lines)}{_left_out(left_out)}</body>\n</html>\n"
    )


def _extent(parts: Sequence[Section]) -> str:
    sources = {s for part in parts for figure in part.figures for s in figure.sources}
    files, dates = {s.file for s in sources}, sorted({s.date for s in sources if s.date[:1].isdigit()})
    when = f", measured {escape(_between(dates))}" if dates else ""
    return f"From {len(files)} result file{'s' * (len(files) != 1)}{when}."


def _between(dates: Sequence[str]) -> str:
    return dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"


def _headline(lines: Sequence[Headline]) -> str:
    if not lines:
        return ""
    rows = [(h.what, h.value, h.against, _where(h.sources)) for h in lines]
    table = _table(("what", "figure", "against, or how", "file and machine"), rows, "headline")
    return f'<h2 id="{slug(_BEST)}">{_BEST}</h2>\n{table}'


def _where(sources: Sequence[Source]) -> str:
    """Return files, machines and dates of a line."""
    files, machines = ", ".join({s.file: 0 for s in sources}), "; ".join({s.machine: 0 for s in sources})
    return f"{files}: {machines}, {_between(sorted(s.date for s in sources))}"


def _section(part: Section, looks: Styles) -> str:
    figures = "".join(_figure(figure, looks) for figure in part.figures)
    return f'<h2 id="{slug(part.title)}">{escape(part.title)}</h2>\n<div class="figures">\n{figures}</div>\n'


def _figure(figure: Figure, looks: Styles) -> str:
    return (
        f'<figure id="{figure.name}"><h3>{escape(figure.title)}</h3><figcaption>{escape(figure.caption)}</figcaption>'
        f"{draw(figure, looks)}<details><summary>Table of {len(figure.table)} rows</summary>"
        f"{_table(figure.columns, figure.table)}</details>{_sources(figure.sources)}</figure>\n"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    named = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{named}><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n'


def _sources(sources: Sequence[Source]) -> str:
    items = "".join(
        f"<li>{escape(s.file)}, {escape(s.date)}, {escape(s.machine)}:<br><code>{escape(s.command)}</code></li>"
        for s in sources
    )
    if len(sources) <= _SHORT:
        return f'<div class="sources"><ul>{items}</ul></div>'
    files = {s.file for s in sources}
    machines = "; ".join(dict.fromkeys(s.machine for s in sources))
    told = f"{len(files)} file{'s' * (len(files) > 1)}, {_between(sorted({s.date for s in sources}))}, {machines}"
    return (
        f'<div class="sources"><p>{escape(told)}</p><details><summary>Files and commands</summary>'
        f"<ul>{items}</ul></details></div>"
    )


def _left_out(files: Sequence[LeftOut]) -> str:
    if not files:
        return ""
    items = "".join(f"<li>{escape(f.reason)}</li>" for f in files)
    told = f"What the report does not show, and why: {len(files)} files or rows"
    head = f'<h2 id="{slug(_LEFT_OUT)}">{_LEFT_OUT}</h2>'
    return f'{head}\n<details><summary>{told}</summary><ul class="left">{items}</ul></details>\n'
