"""crelle bench: how fast, checked first, beside a baseline of the same run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from crelle.cli import bench_accuracy, bench_startup
from crelle.cli.console import Json, KernelName, Model, Results, err, out, print_json
from crelle.errors import SchemeError

if TYPE_CHECKING:
    from crelle.eval.decode import Speed
    from crelle.eval.gemv import Gemv

NAME = "bench"
app = typer.Typer(
    no_args_is_help=True, help="Measure speed: check first, then time, beside a baseline of the same run."
)

ThreadCounts = Annotated[str, typer.Option("--threads", help="Thread counts, e.g. 1,2; default: all cores.")]

for command in (bench_accuracy, bench_startup):
    app.command(name=command.NAME)(command.run)


@app.command()
def gemv(
    shape: Annotated[str, typer.Option("--shape", help="Outputs x inputs, e.g. 4096x4096.")] = "4096x4096",
    scheme: Annotated[
        list[str] | None, typer.Option("--scheme", help="Schemes to time; repeatable. Default: 2, 3 and 4 bits.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Rows of x: 1 is decoding, hundreds are prefill.")] = 1,
    working_set: Annotated[str, typer.Option("--working-set", help="hot, cold or both.")] = "hot",
    precision: Annotated[
        str, typer.Option("--precision", help="What x is rounded to: exact (16 bits) or int8.")
    ] = "exact",
    isa: Annotated[
        str | None,
        typer.Option("--isa", help="Insist on an instruction set; `crelle doctor` lists those of this machine."),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option("--peer", help="A command that times the same product elsewhere (docs/kernels/cpu.md)."),
    ] = None,
    threads: ThreadCounts = "",
    results: Results = None,
    json: Json = False,
) -> None:
    """Time one matrix product on the CPU kernels.

    Every kernel is first compared with f64 of the dequantized weight. The roofline is a plain read of the same bytes by
    the same threads in the same run; `hot` weights come from the caches, `cold` ones from memory.

    **Example**: `crelle bench gemv --shape 11008x4096 --scheme bcq:bits=2,group=128 --working-set both --threads 1,2`

    With one scheme, one working set and one thread count `--json` prints that measurement; otherwise {"rows": […]}.
    """
    from crelle.eval.gemv import measure
    from crelle.eval.machine import write_result

    N, K = _shape(shape)
    schemes = scheme or [f"{s}:bits={b},group=128" for b in (2, 3, 4) for s in ("bcq", "rtn")]
    sets = ["hot", "cold"] if working_set == "both" else [working_set]
    rows = []
    for s in schemes:
        for where in sets:
            for n in _threads(threads):
                with err.status(f"{s}, {where}, {n} threads"):
                    row = measure(
                        N,
                        K,
                        s,
                        batch=batch,
                        threads=n,
                        working_set=where,
                        precision=precision,
                        isa=isa,
                        peer=peer,
                    )
                rows.append(row)
    if results:
        write_result(results, {"rows": [asdict(r) for r in rows]})
        _plot_gemv(results.with_suffix(".png"), rows)
    if json:
        print_json(rows[0] if len(rows) == 1 else {"rows": [asdict(r) for r in rows]})
        return
    table = Table(
        Column("scheme", no_wrap=True), "set", "threads", "us", "GB/s", "of roofline", "torch us", "faster", "error"
    )
    for r in rows:
        table.add_row(
            r.scheme,
            r.working_set,
            str(r.threads),
            f"{r.microseconds:.1f}",
            f"{r.gb_per_s:.1f}",
            f"{r.share_of_roofline:.0%}",
            f"{r.baseline_microseconds:.0f}",
            f"{r.speedup:.1f}x",
            f"{r.max_rel_err:.1e}",
        )
        for who, us in r.peers.items():
            table.add_row(
                f"  {who}", r.working_set, str(r.threads), f"{us:.1f}", "", "", "", f"{us / r.microseconds:.2f}x"
            )
    out.print(f"{N} x {K}, batch {batch}, {rows[0].isa}, {precision}", highlight=False)
    out.print(table)


@app.command()
def decode(
    model: Model,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to decode.")] = 64,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of the prefill.")] = 512,
    threads: ThreadCounts = "",
    llama_bench: Annotated[
        Path | None, typer.Option("--llama-bench", help="An existing llama-bench to time in the same run.")
    ] = None,
    llama_model: Annotated[
        list[Path] | None, typer.Option("--llama-model", help="GGUF files for it; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Turns that each party takes; the best counts.")] = 5,
    kernel: KernelName = None,
    results: Results = None,
    json: Json = False,
) -> None:
    """Time whole-model decoding (after an empty context) and prefill, in tokens per second.

    **Example**: `crelle bench decode out/m --threads 1,2 --llama-bench ./llama-bench --llama-model q4_0.gguf`
    """
    from crelle.engine.llm import LLM
    from crelle.eval.decode import measure, measure_llama_bench
    from crelle.eval.machine import write_result

    if llama_model and not llama_bench:
        raise SchemeError("--llama-model needs --llama-bench, the program to run it with")
    rows: list[Speed] = []
    for n in _threads(threads):
        llm = LLM.load(model, device="cpu", threads=n, kernel=kernel)
        with err.status(f"{n} threads"):
            rows.append(measure(llm, n, tokens=tokens, prompt=prompt, rounds=rounds))
            for gguf in llama_model or []:
                assert llama_bench is not None
                rows.append(measure_llama_bench(llama_bench, gguf, n, tokens=tokens, prompt=prompt))
    if results:
        write_result(results, {"rows": [asdict(r) for r in rows]})
        _plot_decode(results.with_suffix(".png"), rows)
    if json:
        print_json(rows[0] if len(rows) == 1 else {"rows": [asdict(r) for r in rows]})
        return
    table = Table(Column("who", no_wrap=True), "threads", f"decode {tokens}, tokens/s", f"prefill {prompt}, tokens/s")
    for row in rows:
        decoded, read = row.decode_tokens_per_second, row.prefill_tokens_per_second
        table.add_row(row.who, str(row.threads), f"{decoded:.1f}", f"{read:.0f}")
    out.print(table)


def _shape(text: str) -> tuple[int, int]:
    N, _, K = text.partition("x")
    if not (N.isdigit() and K.isdigit() and int(N) and int(K)):
        raise SchemeError(f"--shape should read OUTPUTSxINPUTS, e.g. 4096x4096; got '{text}'")
    return int(N), int(K)


def _threads(text: str) -> list[int]:
    from crelle.kernels.threads import available_cores

    if not text:
        return [available_cores()]
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdigit() and int(p) for p in parts):
        raise SchemeError(f"--threads should read like 1,2; got '{text}'")
    return [int(p) for p in parts]


def _plot_decode(path: Path, rows: "list[Speed]") -> None:
    from crelle.eval.plots import plot_bars

    labels = [f"{r.who}, {r.threads} threads" for r in rows]
    plot_bars(path, labels, {"decode": [r.decode_tokens_per_second for r in rows]}, "decoding", "tokens per second")


def _plot_gemv(path: Path, rows: "list[Gemv]") -> None:
    from crelle.eval.plots import plot_bars

    labels = [f"{r.scheme} {r.working_set} t{r.threads}" for r in rows]
    shares = {"GB/s": [r.gb_per_s for r in rows], "roofline": [r.roofline_gb_per_s for r in rows]}
    N, K = rows[0].shape
    plot_bars(path, labels, shares, f"{N} x {K}, batch {rows[0].batch}, {rows[0].isa}", "GB/s")
