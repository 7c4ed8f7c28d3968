"""crelle eval --tasks: accuracy on zero-shot tasks, and the paired comparison of two models."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from crelle.cli.common.console import out, print_json, tracking
from crelle.cli.common.option_groups import ModelOptions, option_group
from crelle.errors import SchemeError

if TYPE_CHECKING:
    from crelle.eval.tasks.journal import ItemResult
    from crelle.eval.tasks.spec import TaskSpec

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Which tasks, and where their data lies."""

    tasks: str | None
    data: Path | None
    limit: int | None
    results: Path | None

    def check(self) -> None:
        """Refuse options that mean nothing without others."""
        given = {"--data": self.data, "--limit": self.limit, "--results": self.results}
        if self.tasks is None and (alone := [name for name, value in given.items() if value is not None]):
            raise SchemeError(f"{alone[0]} needs --tasks, for example --tasks piqa,arc_easy")
        if self.tasks is not None and self.data is None:
            raise SchemeError("--tasks needs --data, the directory with the tasks' files (piqa.jsonl, …)")

    def specs(self) -> "list[TaskSpec]":
        from crelle.eval.tasks.spec import find_task

        assert self.tasks is not None
        assert self.data is not None
        names = dict.fromkeys(name.strip() for name in self.tasks.split(","))
        return [find_task(name, self.data) for name in names]


task_options = option_group(
    "chosen",
    {
        "tasks": (
            Annotated[
                str | None,
                typer.Option("--tasks", help="Measure accuracy on these tasks, e.g. piqa,arc_easy,winogrande,boolq."),
            ],
            None,
        ),
        "data": (
            Annotated[
                Path | None, typer.Option("--data", help="With --tasks: directory with NAME.jsonl of each task.")
            ],
            None,
        ),
        "limit": (
            Annotated[
                int | None, typer.Option("--limit", help="With --tasks: evaluate only the first N items of each task.")
            ],
            None,
        ),
        "results": (
            Annotated[
                Path | None,
                typer.Option(
                    "--results", help="With --tasks: directory for the result of each item; a rerun continues from it."
                ),
            ],
            None,
        ),
    },
    TaskOptions,
)


def run_tasks(model: Path, against: Path | None, options: ModelOptions, chosen: TaskOptions, json: bool) -> None:
    """Print the accuracy of a model, and how it differs from another one's on the same items."""
    from crelle.eval.tasks.items import read_items
    from crelle.eval.tasks.scoring import compare, summarize
    from crelle.formats.storage.open import open_weights

    specs = chosen.specs()
    for spec in specs:  # what is wrong with a file or a model is better told of before hours of scoring
        read_items(spec)
    if against is not None:
        open_weights(against)
    ours = _score(model, options, specs, chosen)
    theirs = None if against is None else _score(against, options.plain(), specs, chosen)
    figures: dict[str, Figures] = {}
    for spec in specs:
        figures[spec.name] = asdict(summarize(spec, ours[spec.name]))
        if theirs is not None:
            other = summarize(spec, theirs[spec.name])
            plain, norm = compare(ours[spec.name], theirs[spec.name])
            both = {"paired": asdict(plain), "paired_norm": None if norm is None else asdict(norm)}
            figures[spec.name]["against"] = asdict(other) | both
    if json:
        print_json({"model": str(model), "against": None if against is None else str(against), "tasks": figures})
    else:
        out.print(_table(figures, against is not None))


def _score(
    model: Path, options: ModelOptions, specs: "Sequence[TaskSpec]", chosen: TaskOptions
) -> "dict[str, list[ItemResult]]":
    """Score all tasks by one model, which is gone from memory afterwards."""
    from crelle.eval.tasks.scoring import score_task

    llm, found = options.load(model), {}
    for spec in specs:
        with tracking(f"{spec.name}, {model.name}") as track:
            found[spec.name] = score_task(llm, spec, limit=chosen.limit, results=chosen.results, progress=track)
    del llm
    gc.collect()  # the command line collects late (crelle.cli.main), and another model may need the memory
    return found


def _table(figures: dict[str, Figures], compared: bool) -> Table:
    """Return all tasks as a table, with a row more for the length-normalised accuracy; in percent."""
    table = Table("task", "items", "accuracy", *(["against", "difference", "p"] if compared else []))
    for name, f in figures.items():
        for norm in ("", "_norm") if f["accuracy_norm"] is not None else ("",):
            row = [f"{name}, normalised" if norm else name, str(f["items"])]
            row.append(_percent(f[f"accuracy{norm}"], f[f"stderr{norm}"]))
            if compared:
                other = f["against"]
                pair = other[f"paired{norm}"]
                row.append(_percent(other[f"accuracy{norm}"], other[f"stderr{norm}"]))
                row += [_percent(pair["difference"], pair["stderr"], sign="+"), f"{pair['p_value']:.3g}"]
            table.add_row(*row)
    return table


def _percent(value: float, stderr: float | None, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}" + ("" if stderr is None else f" ± {100 * stderr:.1f}")
