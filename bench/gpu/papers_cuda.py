"""The papers' tables of speed on one GPU: products, their energy, dataflows of mixed matrices, whole steps.

    python bench/gpu/papers_cuda.py OUT [AREA …] [--minutes 8] [--only REGEX] [--plan]

Writes OUT/h200-papers-AREA.json after each row; rows that are there are not measured again, none is begun after
--minutes, and one that is refused is told of. --plan only lists the rows. Kernels are compiled before, side by side.

products    binary-coded matrices of 1 to 8 bits, with groups of 32, 64, 128 and a row, beside cuBLAS fp16: LUT-GEMM
            Tables 1 and 2, nuQmm Tables 2 to 4
energy      some of them with joules and watts (NVML)
look-up     the papers' kernel, tables in shared memory as they are and with a bank for each lane, beside the default
dataflow    mixed matrices without and with outliers: the default kernel; and mixed_gemv.cu synchronous, pipelined and
            asynchronous (crelle.kernels.cuda.mixed.mixed_config), each with the fastest of its tile configs
opt, mixed, llama, opt-groups
            whole steps in the engine, one sequence, random weights, and where a step's time goes
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crelle.bench import decode_cuda
from crelle.bench.environment import write_result
from crelle.bench.kernels import gemv_cuda
from crelle.bench.kernels.cuda_timer import Ceiling, Replay, clone, copies, gpu, poison, read_ceiling
from crelle.bench.kernels.random_matrices import random_generator, random_matrix
from crelle.bench.model_shapes import RandomWeights
from crelle.errors import CrelleError, UnsupportedError
from crelle.formats.storage.io import read_json
from crelle.kernels import ops
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.launch import recording
from crelle.kernels.cuda.lut import lut
from crelle.kernels.cuda.mixed import mixed_gemv, mixed_layout
from crelle.kernels.cuda.mixed.mixed_config import DATAFLOWS, dataflow_configs
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight
from crelle.kernels.cuda.planes import bmma_gemv, weight_layout
from crelle.quantizers.scheme import parse

HALF, DEVICE = torch.float16, torch.device("cuda")
QKV, FFN1, FFN2 = (36864, 12288), (49152, 12288), (12288, 49152)  # of OPT-175B
SQUARES = [(n, n) for n in (4096, 7168, 8192, 12288, 16384)]
LOOK_UP = [(4096, 4096), (12288, 12288), FFN1]
MIXED, OUTLIERS = "mixed:group=16,four=0.25,outliers={}", (0, 0.001, 0.002, 0.005, 0.01, 0.015)
VARIANTS: dict[str, lut.Variant] = {"shared": "SHARED", "private": "PRIVATE"}  # tables of the look-up kernel
CONTEXT, TOKENS, ROUNDS = 128, 64, 2
Shape = tuple[int, int]
Row = dict[str, Any]


class Case(NamedTuple):
    """A row: what says which it is, and what measures the rest."""

    key: Row
    measure: Callable[[], Row]
    weight: tuple[Shape, str] | None = None  # of a product


@cache
def ceiling() -> Ceiling:
    return read_ceiling()


@cache
def cublas(N: int, K: int, energy: bool) -> gemv_cuda.Baseline:
    return gemv_cuda.baseline(N, K, 1, HALF, energy)


def product(shape: Shape, scheme: str, kernel: str | None = None, energy: bool = False) -> Row:
    against = cublas(*shape, energy)
    row = gemv_cuda.measure(*shape, scheme, kernel=kernel, ceiling=ceiling(), against=against, energy=energy)
    found = asdict(row)
    if row.joules_per_call is not None and against.joules is not None:
        found["watts"] = 1e6 * row.joules_per_call / row.microseconds
        found["baseline_watts"] = 1e6 * against.joules / against.microseconds
    return found


def products() -> Iterator[Case]:
    def row(shape: Shape, scheme: str) -> Case:
        return Case({"shape": list(shape), "scheme": scheme}, partial(product, shape, scheme), (shape, scheme))

    shapes = [FFN1, (12288, 12288), (4096, 4096), (7168, 7168), QKV, FFN2, (8192, 8192), (16384, 16384)]
    for shape in shapes:
        yield from (row(shape, f"bcq:bits={bits},group=row,rounds=0") for bits in (2, 3, 4, 1, 5, 6, 7, 8))
    for shape in shapes:
        groups = ((group, bits) for group in (128, 64, 32) for bits in (2, 3, 4))
        yield from (row(shape, f"bcq:bits={bits},group={group},rounds=0") for group, bits in groups)


def energy() -> Iterator[Case]:
    for shape in (QKV, (12288, 12288), FFN1, FFN2, (8192, 8192), (16384, 16384)):
        for bits in (2, 4):
            scheme = f"bcq:bits={bits},group=row,rounds=0"
            yield Case(
                {"shape": list(shape), "scheme": scheme}, partial(product, shape, scheme, None, True), (shape, scheme)
            )


# --- the papers' own kernels ------------------------------------------------------------------------------------------


def timed(multiply: Callable[[Any], Tensor], weights: Sequence[Any], oracle: Tensor, what: str) -> Row:
    """Check, then time a product: microseconds, and the error over the norm of the f64 result."""
    poison(*oracle.shape, dtype=HALF)
    y = multiply(weights[0])
    error = float((y.double() - oracle).norm() / oracle.norm())
    if not error <= gemv_cuda.TOLERANCE or not torch.equal(y, multiply(weights[0])):
        raise UnsupportedError(f"{what} is wrong (relative error {error:.3g}) or differs from run to run: not timed")
    replay = Replay([partial(multiply, w) for w in weights])
    replay.check(y, what)
    return {"microseconds": replay.microseconds(), "rel_err": error}


def prepared(shape: Shape, scheme: str, kernel: str) -> tuple[Tensor, Tensor, list[Any]]:
    """Return x, x @ W.T in f64, and more copies of the prepared weight than the cache holds."""
    random = random_generator(0, DEVICE)
    w = random_matrix(parse(scheme), *shape, random)
    x = torch.randn(1, shape[1], generator=random, dtype=HALF, device=DEVICE)
    first: Any = ops.prepare(w, HALF, kernel).data
    more = [clone(first) for _ in range(copies(first.nbytes) - 1)]
    return x, gemv_cuda.exact(x, w), [first, *more]


def look_up(shape: Shape, scheme: str, variant: str) -> Row:
    if variant == "bit-serial":
        return product(shape, scheme)
    x, oracle, weights = prepared(shape, scheme, "cuda-lut")
    row = timed(lambda w: lut.matmul(x, w, variant=VARIANTS[variant]), weights, oracle, f"{shape} {scheme} {variant}")
    against = cublas(*shape, False).microseconds
    row |= {"bytes": weights[0].nbytes, "gb_per_s": weights[0].nbytes / row["microseconds"] / 1e3}
    return row | {"baseline_microseconds": against, "speedup": against / row["microseconds"]}


def look_ups() -> Iterator[Case]:
    for shape in LOOK_UP:
        for scheme in (f"bcq:bits={bits},group=128,rounds=0" for bits in (2, 3, 4)):
            for variant in ("bit-serial", *VARIANTS):
                key = {"shape": list(shape), "scheme": scheme, "variant": variant}
                yield Case(key, partial(look_up, shape, scheme, variant), (shape, scheme))


def dataflow(shape: Shape, outliers: float) -> Row:
    """Time the default kernel from x to y, and each dataflow with x already encoded, best of its tile configs."""
    scheme = MIXED.format(outliers)
    x, oracle, weights = prepared(shape, scheme, "cuda-mixed")
    first: MixedWeight = weights[0]
    against = cublas(*shape, False).microseconds
    default = timed(lambda w: mixed_gemv.matmul(x, w), weights, oracle, f"{shape} {scheme}")
    found: Row = {"bytes": first.nbytes, "bits_per_weight": 8 * first.nbytes / (shape[0] * shape[1])}
    found |= {"baseline_microseconds": against, "default": default, "speedup": against / default["microseconds"]}
    xs = mixed_gemv.encode(x, first)
    found["encode_microseconds"] = Replay([lambda: mixed_gemv.encode(x, first).rows] * 64).microseconds()
    for way in DATAFLOWS:
        each = []
        for c in dataflow_configs(first, 1, way):
            multiply = partial(mixed_gemv.product, xs, dtype=HALF, config=c)
            row = timed(lambda w, multiply=multiply: multiply(w), weights, oracle, f"{shape} {scheme} {c}")  # type: ignore[misc]
            each.append(row | {"config": asdict(c)})
        best = min(each, key=lambda r: r["microseconds"])
        found[way] = best | {"configs": len(each), "speedup": against / best["microseconds"]}
    us = {way: found[way]["microseconds"] for way in DATAFLOWS}
    found |= {f"asynchronous_over_{way}": us[way] / us["asynchronous"] for way in DATAFLOWS[:2]}
    return found


def dataflows() -> Iterator[Case]:
    for shape in ((4096, 4096), (12288, 12288), FFN1):
        for outliers in OUTLIERS if shape != FFN1 else (0, 0.002, 0.01):
            key = {"shape": list(shape), "outliers": outliers, "scheme": MIXED.format(outliers)}
            yield Case(key, partial(dataflow, shape, outliers), (shape, MIXED.format(outliers)))


# --- whole steps ------------------------------------------------------------------------------------------------------


def step(shape: str, scheme: str, energy: bool) -> Row:
    begun = perf_counter()
    weights = RandomWeights(shape, scheme, DEVICE)
    options = {"tokens": TOKENS, "context": CONTEXT, "rounds": ROUNDS}
    row = asdict(
        decode_cuda.measure(weights, scheme, DEVICE, ceiling=ceiling(), energy=energy, profile=True, **options)
    )
    if row["breakdown"] is not None:
        del row["breakdown"]["kernels"]  # a long list
    if row["joules_per_token"] is not None:
        row["watts"] = row["joules_per_token"] * row["tokens_per_second"]
    return row | {"seconds": perf_counter() - begun}


def steps(models: Sequence[tuple[str, list[str]]], energies: str) -> Iterator[Case]:
    """energies: a regular expression for the models and schemes whose energy is measured."""
    for shape, schemes in models:
        for scheme in schemes:
            with_energy = re.search(energies, f"{shape} {scheme}") is not None
            yield Case({"model": shape, "scheme": scheme}, partial(step, shape, scheme, with_energy))


def bcq(pairs: str) -> list[str]:
    return [f"bcq:bits={bits},group={group}" for bits, group in (pair.split("/") for pair in pairs.split())]


OPT = [
    ("opt-175b", bcq("3/row 2/row 1/row 4/128")),
    *((shape, ["fp16", *bcq("3/row 4/row")]) for shape in ("opt-66b", "opt-30b")),
]
OPT_GROUPS = [
    ("opt-175b", bcq("2/128 2/64 2/32 3/128 4/row")),
    *((shape, bcq("3/128 4/128")) for shape in ("opt-66b", "opt-30b")),
]
LLAMA = [(shape, ["fp16", *bcq("4/128 3/128")]) for shape in ("llama-65b", "llama-30b", "llama2-13b")]
MIXED_MODELS = [(s, ["fp16", MIXED.format(0.002)]) for s in ("llama2-7b", "llama3-8b", "llama2-13b", "llama2-70b")]
AREAS: dict[str, Callable[[], Iterator[Case]]] = {
    "products": products,
    "energy": energy,
    "look-up": look_ups,
    "dataflow": dataflows,
    "opt": lambda: steps(OPT, "opt-175b bcq:bits=[23]"),
    "mixed": lambda: steps(MIXED_MODELS, "."),
    "llama": lambda: steps(LLAMA, "13b bcq"),
    "opt-groups": lambda: steps(OPT_GROUPS, "no energy"),
}


# --- the run ----------------------------------------------------------------------------------------------------------


def kernels_of(case: Case, area: str, device: torch.device = DEVICE) -> set[tuple[str, str]]:
    """Return the kernels of a product, by a weight of the same form of which only one tile of rows is made."""
    if case.weight is None:
        return set()
    (N, K), scheme = case.weight
    small = random_matrix(parse(scheme), 16, K, random_generator(0, device))
    x, tiles = torch.zeros(1, K, dtype=HALF, device=device), -(-N // 16)
    with recording() as found:
        if area == "dataflow":
            w = mixed_layout.lay_out(small)
            w = replace(w, N=N, tiles=w.tiles[:1].expand(tiles, -1), rows=w.rows[:1].expand(tiles * 16, -1))
            mixed_gemv.matmul(x, w)
            xs = mixed_gemv.encode(x, w)
            for way in DATAFLOWS:
                for c in dataflow_configs(w, 1, way):
                    mixed_gemv.product(xs, w, HALF, config=c)
        elif (variant := case.key.get("variant", "bit-serial")) == "bit-serial":
            bmma_gemv.matmul(x, replace(weight_layout.lay_out(small), N=N))
        else:
            semaphores = torch.zeros(tiles, dtype=torch.int32, device=device)
            lut.matmul(x, replace(lut.lay_out(small), N=N, semaphores=semaphores), variant=VARIANTS[variant])
    return found


def shown(row: Row) -> str:
    """Return some figures of a row."""
    us = {way: f"{row[way]['microseconds']:.2f}" for way in ("default", *DATAFLOWS) if way in row}
    if us:
        return f"cuBLAS {row['baseline_microseconds']:.2f} us, " + ", ".join(f"{way} {t}" for way, t in us.items())
    if "milliseconds_per_token" in row:
        parts = (row["breakdown"] or {}).get("milliseconds", {})
        joules = "" if row["joules_per_token"] is None else f", {row['joules_per_token']:.2f} J"
        each = ", ".join(f"{kind} {ms:.2f}" for kind, ms in parts.items())
        return f"{row['milliseconds_per_token']:.3f} ms{joules}, {row['seconds']:.1f} s; {each}"
    watts = f", {row['watts']:.0f} of {row['baseline_watts']:.0f} W" if "watts" in row else ""
    return f"{row['microseconds']:.2f} us, {row['speedup']:.2f} times cuBLAS fp16{watts}"


def run(area: str, cases: list[Case], to: Path, end: float, command: str) -> None:
    rows: list[Row] = read_json(to)["rows"] if to.is_file() else []
    missing = [c for c in cases if not any(all(r.get(k) == v for k, v in c.key.items()) for r in rows)]
    begun, needed = perf_counter(), set[tuple[str, str]]()
    for case in missing if perf_counter() < end else []:
        needed |= kernels_of(case, area)
    jit.compile_all(sorted(needed))
    print(f"== {area}: {len(missing)} rows, {len(needed)} kernels in {perf_counter() - begun:.1f} s", flush=True)
    for case in missing:
        if perf_counter() > end:
            print(f"{area}: no time is left from {case.key} on", flush=True)
            return
        try:
            row = {**case.measure(), **case.key}
        except (CrelleError, RuntimeError) as e:  # the others go on; a RuntimeError is CUDA's or torch's
            print(f"{area} {case.key}: {' '.join(str(e).split())[:300]}", flush=True)
            decode_cuda.free_memory()
            continue
        rows.append(row)
        print(f"{area} {' '.join(map(str, case.key.values()))}: {shown(row)}", flush=True)
        facts = {"command": command, "gpu": gpu(), "read_ceiling_gb_per_s": ceiling().gb_per_s, "rows": rows}
        write_result(to, facts)
        decode_cuda.free_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"default: {', '.join(AREAS)}")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", default="", help="a regular expression for what says which row it is")
    parser.add_argument("--plan", action="store_true")
    args = parser.parse_args()
    areas = args.areas or list(AREAS)
    if unknown := [area for area in areas if area not in AREAS]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(AREAS)}")
    end = perf_counter() + 60 * args.minutes
    for area in areas:
        cases = [c for c in AREAS[area]() if re.search(args.only, " ".join(map(str, c.key.values())))]
        if args.plan:
            print(f"{area}: {len(cases)} rows", *(f"    {c.key}" for c in cases), sep="\n")
            continue
        only = f" --only '{args.only}'" if args.only else ""
        run(
            area, cases, args.out / f"h200-papers-{area}.json", end, f"python bench/gpu/papers_cuda.py OUT {area}{only}"
        )


if __name__ == "__main__":
    main()
