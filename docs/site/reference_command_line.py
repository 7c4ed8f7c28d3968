"""The reference of the command line, from the typer app: help, arguments and options of every command."""

from typing import Any

import typer

from crelle.cli.main import app


def text() -> str:
    """Return a section for each command, those of groups below them."""
    return "\n".join(_sections(typer.main.get_command(app), ("crelle",)))


def _sections(command: Any, path: tuple[str, ...]) -> list[str]:
    inner = getattr(command, "commands", {})
    depth = "#" * (len(path) + 1)
    parts = [f"{depth} {' '.join(path)}\n", f"{(command.help or '').strip()}\n"]
    parameters = [p for p in command.params if not p.hidden and p.name != "help"]
    if not inner:
        parts.append(f"```text\n{' '.join([*path, *_usage(parameters)])}\n```\n")
    if parameters:
        parts.append("| | meaning | default |\n|---|---|---|\n" + "\n".join(map(_row, parameters)) + "\n")
    return parts + [part for name, c in inner.items() if not c.hidden for part in _sections(c, (*path, name))]


def _usage(parameters: list[Any]) -> list[str]:
    arguments = [p for p in parameters if not _is_option(p)]
    names = [(p.metavar or p.name.upper()) for p in arguments]
    shown = [name if p.required else f"[{name}]" for name, p in zip(names, arguments, strict=True)]
    needed = [f"{p.opts[0]} {_value(p)}" for p in parameters if _is_option(p) and p.required]
    rest = any(_is_option(p) and not p.required for p in parameters)
    return [*shown, *needed, *(["[OPTIONS]"] if rest else [])]


def _row(p: Any) -> str:
    names = [*p.opts, *p.secondary_opts] if _is_option(p) else [p.metavar or p.name.upper()]
    value = f" {_value(p)}" if _is_option(p) and not p.is_flag else ""
    name = ", ".join(f"`{n}{value if i == 0 else ''}`" for i, n in enumerate(names)).replace("|", "\\|")
    meaning = " ".join((p.help or "").split()).replace("|", "\\|").replace("<", "&lt;")
    return f"| {name} | {meaning} | {_default(p)} |"


def _is_option(p: Any) -> bool:
    return bool(p.opts[0].startswith("-"))


def _value(p: Any) -> str:
    kind = p.type_descriptor.annotation
    return p.metavar or {int: "N", float: "X"}.get(kind, "FILE" if "Path" in str(kind) else "TEXT")


def _default(p: Any) -> str:
    if p.required:
        return "required"
    if p.default in (None, False, "", [], ()) or callable(p.default):
        return ""
    value = "yes" if p.default is True else p.default
    return f"`{value}`".replace("|", "\\|")
