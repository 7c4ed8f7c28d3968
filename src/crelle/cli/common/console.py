"""What all commands share: their options, one JSON object on standard output, progress and errors on standard error."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from crelle.cli.common.completion import devices, models
from crelle.printable import CONTROL, printable


class Terminal(Console):
    """A console for untrusted text: no markup or emoji codes in strings, and control characters are made visible."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):  # rich's own codes have `control` or are a style
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


out = Terminal()
err = Terminal(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]
Device = Annotated[
    str,
    typer.Option("--device", help="Device: cpu, cuda or auto (cuda if available).", autocompletion=devices),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="0,1,…|all|cpu,cpu",
        help="Run on several GPUs, one process each: their indices, or all. cpu,cpu runs two processes on the CPU.",
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", help="Number of CPU threads; default: all available cores.")]
KernelName = Annotated[
    str | None, typer.Option("--kernel", help="Force this kernel; `crelle explain MODEL --why` lists the kernels.")
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="GPU memory limit for weights, workspace and KV cache, e.g. 24GB; default: 90% of what is free. Experts "
        "that do not fit are streamed from host memory.",
    ),
]
Scales = Annotated[
    Path | None,
    typer.Option("--scales", metavar="FILE", help="Scales of a task, written by `crelle tune --scales`."),
]
KV = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="KV cache format: 16, 8, 4, 3, 2, k4v2, kv4:group=64 or 4,layers.0=8 (docs/notes/kv.md); "
        "default: that of the checkpoint's scheme (atom:kv=4), else 16.",
    ),
]
Speculate = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="off|ngram|draft",
        help="Guess tokens and verify several in one step; the text stays the same. ngram looks them up in the prompt "
        "and the text so far, draft asks --draft; ngram:tokens=5 guesses at most 5. Default: on, as far as it pays; "
        "on a GPU only with --exact.",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="DIR|BITS",
        help="A smaller model with the same vocabulary that guesses tokens, or the bits of a nested checkpoint.",
    ),
]
Bits = Annotated[
    int | None,
    typer.Option("--bits", help="Bits to run a nested checkpoint at (scheme bcq-nested); default: the highest."),
]
Results = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Write NAME.json (results, machine, versions, command) and, if there is a plot, NAME.png."
    ),
]
Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Crelle checkpoint, Hugging Face directory, or .gguf file.",
        autocompletion=models,
    ),
]


def print_json(value: Any) -> None:
    """Write one JSON object to standard output.

    JSON has no NaN and no infinity: such a figure is null, and standard error names it.
    """
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    lost: list[str] = []
    value = _finite(value, "", lost)
    if lost:
        err.print(f"not finite, written as null in the JSON: {', '.join(lost)}", highlight=False, soft_wrap=True)
    escaped = "utf" not in (sys.stdout.encoding or "utf-8").lower()
    text = json.dumps(value, ensure_ascii=escaped, default=str, allow_nan=False)
    # Names in a file may contain control characters or lone surrogates, which a terminal must not receive.
    print(CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)


def print_text(text: str, end: str = "") -> None:
    """Write text of a model to standard output: as it is to a file or pipe, printable to a terminal."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def _finite(value: Any, at: str, lost: list[str]) -> Any:
    """Return a value with None for floats that are not finite; their places are added to `lost`."""
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(f"{at.lstrip('.')} = {value}")
        return None
    if isinstance(value, dict):
        return {key: _finite(each, f"{at}.{key}", lost) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each, f"{at}[{i}]", lost) for i, each in enumerate(value)]
    return value


class Track(Protocol):
    """Updates a progress bar: steps done, total steps, and a note about the current step."""

    def __call__(self, done: int, total: int, note: str) -> None: ...


@contextmanager
def tracking(what: str = "") -> Iterator[Track]:
    """Show a progress bar with the time left on standard error while the block runs; `what` precedes the notes."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as bar:
        task = bar.add_task(what or "starting", total=None)

        def track(done: int, total: int, note: str) -> None:
            bar.update(task, description=f"{what} {note}".strip(), completed=done, total=total)

        try:
            yield track
        except BaseException:
            bar.live.transient = True  # hide the unfinished bar and print only the error
            raise


def warn(sentences: Iterable[str]) -> None:
    """Print warnings on standard error."""
    for sentence in sentences:
        err.print(f"warning: {sentence}", highlight=False, markup=False, soft_wrap=True)


def report_compilation(model: Path) -> None:
    """Report on standard error when the first kernel is compiled, which takes seconds without other output."""
    from crelle.kernels.cuda import jit

    def report(file: str, expression: str) -> None:
        jit.on_compile = None
        sentence = f"compiling CUDA kernels (first run only); `crelle warmup {model}` compiles them on all cores"
        err.print(sentence, highlight=False, markup=False, soft_wrap=True)

    jit.on_compile = report


def report_streaming(llm: Any) -> None:
    """Report on standard error if experts are streamed from host memory."""
    from crelle.engine.memory.experts import offload_of

    if (offload := offload_of(llm.model)) is not None:
        err.print(f"experts: {offload}", highlight=False, markup=False, soft_wrap=True)


def draw_whole(path: Path, draw: Callable[[Path], None]) -> None:
    """Let `draw` make a plot, and put it at `path` when it is complete."""
    import tempfile

    from crelle.formats.storage.io import write_whole

    with tempfile.TemporaryDirectory(prefix="crelle-picture-") as d:
        made = Path(d) / path.name
        draw(made)
        write_whole(path, made.read_bytes())


@contextmanager
def reading_input() -> Iterator[None]:
    """Turn invalid UTF-8 on standard input into a SchemeError."""
    from crelle.errors import SchemeError

    try:
        yield
    except UnicodeDecodeError as e:
        raise SchemeError(f"standard input is not UTF-8 text: {e}") from e


def device_or_devices(context: typer.Context, device: str, devices: str | None) -> str:
    """Return --device; auto if --devices is given and --device is not."""
    source = context.get_parameter_source("device")
    by_default = source is not None and source.name == "DEFAULT"
    return "auto" if devices is not None and by_default else device


def use_threads(threads: int | None) -> None:
    """Set the thread count of torch and of our kernels; by default the cores in the affinity mask."""
    from crelle.kernels.threads import set_threads

    set_threads(threads)
