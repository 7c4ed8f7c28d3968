"""What `make bench` and `make bench-gpu` run: some measurements within a time, then `crelle report` over all of them.

    python bench/measure.py cpu OUT --minutes 20          2 cores
    python bench/measure.py gpu OUT --minutes 10          an H200
    python bench/measure.py gpu OUT --only latency        one of them, then the report
    python bench/measure.py gpu OUT --dry-run             only say what would run

Each command has a process of its own and writes OUT/NAME.json row by row; one that fails, or that the time ends, is
told of, and the others go on. The page is OUT/report.html, its pictures are in OUT/figures if matplotlib is there.
"""

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

Command = list[str]
HERE = Path(__file__).parent
CRELLE = [sys.executable, "-m", "crelle.cli.main"]


def schemes(*names: str) -> Command:
    return [part for name in names for part in ("--scheme", name)]


def pairs(options: str, bits: tuple[int, ...], groups: tuple[str, ...]) -> Command:
    """Return bcq of every (bits, group): the footprints whose latency should lie on a line."""
    return schemes(*(f"bcq:bits={b},group={g}{options}" for b in bits for g in groups))


def bench(what: str, options: str, *more: str) -> Command:
    return [*CRELLE, "bench", what, *options.split(), *more]


def on_cpu(out: Path) -> dict[str, Command]:
    """Some 8 minutes of two idle cores."""
    shape = "--shape smollm2-135m --device cpu"
    quick = schemes("rtn:bits=4,group=64", "bcq:bits=3,group=64", "bcq:bits=2,group=64")
    # rounds=0: a product takes the same time however its weights were chosen
    footprints = pairs(",rounds=0", (2, 3, 4), ("64", "128", "row"))
    return {
        "demo": [*CRELLE, "demo", "--out", str(out / "demo")],
        "latency": bench("gemv", "--device cpu --shape 4096x4096 --working-set cold", *footprints),
        "decode": bench("decode", f"{shape} --tokens 32 --rounds 1", *quick),
        "serve": bench(
            "serve",
            f"{shape} --batch 1,4,8 --context 64 --tokens 16 --kv 16 --kv 4",
            *schemes("rtn:bits=4,group=64"),
        ),
        "quantize": [sys.executable, str(HERE / "quantize.py"), str(out / "quantize.json")],
    }


def on_gpu(out: Path) -> dict[str, Command]:
    """Some 2.5 minutes of an H200."""
    few = schemes("bcq:bits=2,group=128", "bcq:bits=4,group=128", "rtn:bits=4,group=128")
    latency = pairs(",rounds=0", (2, 3, 4), ("64", "128", "256", "512", "row"))
    weights = schemes(*(f"bcq:bits={b},group=128" for b in (4, 3, 2)), "mixed:group=16,four=0.25,outliers=0.002")
    batches = {
        f"batch{M}": bench("gemv", f"--device cuda --no-energy --shape 12288x12288 --batch {M}", *few)
        for M in (4, 16, 64)
    }
    return {
        "latency": bench("gemv", "--device cuda --no-energy --shape 12288x12288", *latency),
        "decode": bench("decode", "--shape llama2-7b --device cuda --cost price=30000", *weights),
        "serve": bench(
            "serve",
            "--shape llama2-7b --device cuda --batch 1,8,32,128 --memory 24GB --kv 16 --kv 4 --tokens 24",
            *schemes("fp16", "rtn:bits=4,group=128"),
        ),
        **batches,
        "attention": bench("attention", "--device cuda --batch 1,16,64 --context 1024 --heads 32/8 --kv 16 --kv 4"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cpu", "gpu"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0, help="for all of it, the report included")
    parser.add_argument("--only", help="names with commas")
    parser.add_argument("--cost", help="for the report: price=…,watt=…")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    commands = {"cpu": on_cpu, "gpu": on_gpu}[args.device](args.out)
    names = args.only.split(",") if args.only else list(commands)
    if unknown := [name for name in names if name not in commands]:
        raise SystemExit(f"there is no {', '.join(unknown)}; there are {', '.join(commands)}")
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes - 30  # for the report
    failed = []
    for name in names:
        command = commands[name]
        if "bench" in command:
            command = [*command, "--out", str(args.out / name)]
        if args.dry_run:
            print(name, " ".join(command[1:]))
        elif why := _run(name, command, end - time.monotonic()):
            failed.append(f"{name} {why}")
    if not args.dry_run:
        _report(args.out, args.cost)
    if failed:
        raise SystemExit("; ".join(failed))


def _run(name: str, command: Command, seconds: float) -> str:
    """Run a command; return why it did not end well, or ''."""
    if seconds <= 0:
        return "was not begun: no time was left"
    begun = time.monotonic()
    print(f"== {name}", flush=True)
    try:
        code = subprocess.run(command, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return "was stopped: no time was left"
    print(f"== {name}: {time.monotonic() - begun:.0f} s", flush=True)
    return f"ended with code {code}" if code else ""


def _report(out: Path, cost: str | None) -> None:
    results = [str(out), *(str(demo) for demo in [out / "demo" / "demo.json"] if demo.exists())]
    pictures = ["--png", str(out / "figures")] if find_spec("matplotlib") else []
    prices = ["--cost", cost] if cost else []
    subprocess.run([*CRELLE, "report", *results, "-o", str(out / "report.html"), *pictures, *prices], check=True)


if __name__ == "__main__":
    main()
