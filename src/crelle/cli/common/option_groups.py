"""Options that several commands share: a command has one parameter for a whole group of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crelle.cli.common.console import (
    KV,
    Bits,
    Device,
    Draft,
    KernelName,
    Scales,
    Speculate,
    Threads,
    report_compilation,
    report_streaming,
    tracking,
)

if TYPE_CHECKING:
    from crelle.engine.engine import Engine
    from crelle.engine.llm import LLM

Command = Callable[..., None]
_PAGES = 4  # of a cache in which nothing is kept


def option_group(
    parameter: str, options: Mapping[str, tuple[Any, Any]], build: Callable[..., Any]
) -> Callable[[Command], Command]:
    """Put options {name: (what typer reads, default)} where a command has `parameter`, which gets build(**options)."""
    group = [Parameter(name, Parameter.KEYWORD_ONLY, annotation=a, default=d) for name, (a, d) in options.items()]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in options}
            command(**given, **{parameter: build(**chosen)})

        shown: list[Parameter] = []
        for p in signature(command).parameters.values():
            shown += group if p.name == parameter else [p.replace(kind=Parameter.KEYWORD_ONLY)]
        run.__signature__ = signature(command).replace(parameters=shown)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in shown}  # typer reads both
        return run

    return decorate


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a command loads and runs its model."""

    bits: int | None
    device: str
    threads: int | None
    kernel: str | None
    kv: str | None = None
    scales: Path | None = None

    def load(self, model: Path, speculation: "SpeculationOptions | None" = None, memory: str | None = None) -> "LLM":
        from crelle.engine.llm import LLM

        given: dict[str, Any] = {"kernel": self.kernel, "bits": self.bits, "kv": self.kv, "scales": self.scales}
        given["memory"] = memory
        if speculation is not None:
            given |= {"speculate": speculation.speculate, "draft": speculation.draft}
        llm = LLM.load(model, device=self.device, **given)
        if llm.model.device.type == "cuda":
            report_compilation(model)
            report_streaming(llm)
        return llm

    def compile(self, llm: "LLM", model: Path, prompts: Sequence[int], engine: "Engine | None" = None) -> None:
        """On the first run, compile the kernels for these prompts on all cores, with a progress bar.

        prompts: their lengths in tokens. engine: what will run them, in batches of any size; None: one at a time.
        """
        from contextlib import suppress

        from crelle.engine.compile_ahead import compile_kernels, mark_of
        from crelle.engine.engine import Engine

        batch = 1 if engine is None else engine.plan.max_batch
        exact = engine is not None and engine.runner.batch_invariant
        mark = mark_of(llm, model.resolve(), self.bits, self.kernel, batch, exact, *prompts)
        if mark is None or mark.exists():
            return
        with tracking("compiling CUDA kernels (first run only)") as track:
            engine = engine or Engine(llm, pages=_PAGES, max_batch=1)
            sizes = range(1, batch + 1)
            compile_kernels(engine, sizes, prompts, progress=lambda done, of: track(done, of, ""))
        with suppress(OSError):  # an unwritable cache: already warned
            mark.touch()

    def plain(self) -> "ModelOptions":
        """Return the same device and threads with all other defaults, for a reference model."""
        return ModelOptions(bits=None, device=self.device, threads=self.threads, kernel=None)


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How a command that generates guesses tokens."""

    speculate: str | None
    draft: str | None


speculation_options = option_group(
    "speculation", {"speculate": (Speculate, None), "draft": (Draft, None)}, SpeculationOptions
)


def _model_options(**given: Any) -> ModelOptions:
    """Return the options; if they allow a GPU, its context is created while the command imports torch."""
    from crelle.kernels.cuda.runtime import early_context

    if given["device"] != "cpu":
        early_context.start()
    return ModelOptions(**given)


model_options = option_group(
    "options",
    {
        "bits": (Bits, None),
        "device": (Device, "auto"),
        "threads": (Threads, None),
        "kernel": (KernelName, None),
        "kv": (KV, None),
        "scales": (Scales, None),
    },
    _model_options,
)
