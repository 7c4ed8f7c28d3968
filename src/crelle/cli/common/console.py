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

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]
Device = Annotated[
    str,
    typer.Option("--device", help="Where to run: cpu, cuda or auto (cuda if there is one).", autocompletion=devices),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="0,1,…|all|cpu,cpu",
        help="Several GPUs, by number, or all; a process for each. Or several processes on the CPU.",
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads; default: all cores given to us.")]
KernelName = Annotated[
    str | None, typer.Option("--kernel", help="Insist on one kernel; `crelle explain MODEL` lists them.")
]
KV = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="KV cache: 16, 8, 4, 3, 2, k4v2, kv4:group=64 or 4,layers.0=8 (docs/notes/kv.md); "
        "default: what the checkpoint was made for (scheme atom:kv=4), else 16.",
    ),
]
Bits = Annotated[
    int | None,
    typer.Option("--bits", help="Precision of a nested checkpoint (scheme bcq-nested); default: the finest."),
]
Results = Annotated[
    Path | None,
    typer.Option("--out", help="Write NAME.json: machine, versions, command, figures; and NAME.png if any."),
]
Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A Crelle checkpoint, a Hugging Face directory, or a .gguf file.",
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
        err.print(f"not a finite number, null in the JSON: {', '.join(lost)}", highlight=False, soft_wrap=True)
    text = json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    # Names in a file may hold characters that a terminal obeys, or halves of surrogate pairs, which it does not take.
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
    """Moves a progress bar: how much is done, of how much, and a word about what is under way."""

    def __call__(self, done: int, total: int, note: str) -> None: ...


@contextmanager
def tracking(what: str) -> Iterator[Track]:
    """Show a progress bar with time left on standard error while the block runs."""
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
        task = bar.add_task(what, total=None)

        def track(done: int, total: int, note: str) -> None:
            bar.update(task, description=f"{what} {note}", completed=done, total=total)

        try:
            yield track
        except BaseException:
            bar.live.transient = True  # a bar that stopped half way tells nothing: the error's sentence stands alone
            raise


def warn(sentences: Iterable[str]) -> None:
    """Print warnings on standard error."""
    for sentence in sentences:
        err.print(f"warning: {sentence}", highlight=False, markup=False, soft_wrap=True)


def tell_compilation(model: Path) -> None:
    """Say on standard error when the first kernel is compiled: seconds in which nothing else is seen."""
    from crelle.kernels.cuda import jit

    def tell(file: str, expression: str) -> None:
        jit.on_compile = None
        said = f"compiling CUDA kernels, once; `crelle warmup {model}` does it ahead, on all cores"
        err.print(said, highlight=False, markup=False, soft_wrap=True)

    jit.on_compile = tell


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
    """Turn bytes on standard input that are not text into a sentence."""
    from crelle.errors import SchemeError

    try:
        yield
    except UnicodeDecodeError as e:
        raise SchemeError(f"standard input is not UTF-8 text: {e}") from e


def device_or_devices(context: typer.Context, device: str, devices: str | None) -> str:
    """Return --device, or, where --devices is there and --device was not given, that it does not count."""
    source = context.get_parameter_source("device")
    by_default = source is not None and source.name == "DEFAULT"
    return "auto" if devices is not None and by_default else device


def use_threads(threads: int | None) -> None:
    """Set the thread count of torch and of our kernels; by default what the affinity mask allows."""
    from crelle.kernels.threads import set_threads

    set_threads(threads)
