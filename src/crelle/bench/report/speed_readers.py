"""Result files about speed: products, attention, decoding, serving; ours and, in the same run, peers'."""

import re
from collections.abc import Iterator

from crelle.bench.planner.cost import CURRENCY
from crelle.bench.report.fields import Fields
from crelle.bench.report.rows import OURS, PEER, REFERENCE, Attention, Product, Row, Source, Step, Throughput
from crelle.bench.report.sources import cpu_device, gpu_name, known_model

_SPEED = "tokens_per_second"


def read_gemv(file: Fields, source: Source) -> Iterator[Row]:
    """Read crelle bench gemv's, of a CPU (where peers may have run too) or a GPU; from x to y."""
    for row in file.rows("rows"):
        setting = ""
        if "working_set" in row:
            parts = (row.text("isa"), row.text("precision"), _threads(row), f"weights {row.text('working_set')}")
            setting = ", ".join(parts)
        yield Product(
            source,
            _device(row, file),
            setting,
            row.shape(),
            row.count("batch"),
            row.text("scheme"),
            row.text("kernel"),
            row.number("bytes"),
            row.number("microseconds"),
            row.text("baseline"),
            row.number("baseline_microseconds"),
            _peers(row),
            row.number_or_none("joules_per_call"),
        )


def read_gemm(file: Fields, source: Source) -> Iterator[Row]:
    """Read crelle bench gemm's."""
    for row in file.rows("rows"):
        times = row.number("microseconds"), row.text("baseline"), row.number("baseline_microseconds")
        names = row.text("scheme"), row.text("kernel"), None
        yield Product(source, _device(row, file), "", row.shape(), row.count("rows"), *names, *times, _peers(row))


def read_decode(file: Fields, source: Source) -> Iterator[Row]:
    """Read crelle bench decode's of whole steps, on a GPU or with --shape."""
    for row in file.rows("rows"):
        cost, currency = _cost(row)
        size, joules = row.number("weight_bytes"), row.number_or_none("joules_per_token")
        setting = f"context {row.count('context')}"
        names = _device(row, file), row.text("model"), row.text("scheme"), setting, row.count("batch")
        yield Step(source, *names, row.number(_SPEED), size, joules, cost, currency=currency)


def read_decode_cpu(file: Fields, source: Source) -> Iterator[Row]:
    """Read crelle bench decode's of a checkpoint on a CPU, with llama-bench in the same run."""
    asked = re.search(r"bench decode (\S+)", source.command)
    model = asked[1].rpartition("/")[2] if asked else "model not recorded"
    for row in file.rows("rows"):
        cost, currency = _cost(row)
        who = row.text("who")
        scheme, peer = ("", who) if who != "crelle" else (model, "")
        kernel = re.search(r"--kernel (\S+)", source.command) if not peer else None
        setting = _threads(row) + (f", {kernel[1]}" if kernel else "")
        speed = row.number("decode_tokens_per_second")
        names = cpu_device(file), model, scheme, setting
        yield Step(source, *names, 1, speed, cost=cost, who=peer, currency=currency)


def _cost(row: Fields) -> tuple[float | None, str]:
    """Return the cost of a million tokens, if a row has it, and its currency."""
    if "cost" not in row:
        return None, CURRENCY
    cost = row.inner("cost")
    return cost.number("total"), cost.text("currency", CURRENCY)


def read_serve(file: Fields, source: Source) -> Iterator[Row]:
    """Read crelle bench serve's, bench/gpu/serve_cuda.py's and bench/gpu/trace_cuda.py's: batches, clients, traces."""
    asked = re.search(r"--threads (\d+)", source.command)
    threads = f", --threads {asked[1]}" if asked else ""  # rows do not say how many they ran on
    several = any("server" in row for row in file.rows("rows"))  # each server has its own name for the model
    shared = known_model(row.text("model") for row in file.rows("rows")) if several else None
    for row in file.rows("rows"):
        model, kv = row.text("model"), row.text("kv", "")
        device = _device(row, file) if "device" in row else cpu_device(file)
        series = row.text("server", f"{row.text('scheme', model)} {kv}".strip())
        whose = PEER if "server" in row and not series.startswith("crelle") else _whose(row.text("scheme", ""))
        memory = row.text("memory", "")
        if "server" in row:
            model = known_model([model]) or shared or model
        if "batch" in row:
            setting, over, count = f"after {row.count('context')} tokens{threads}", "batch", row.count("batch")
            yield Throughput(
                source, device, model, setting, series, over, count, row.number(_SPEED), memory, None, whose
            )
            continue
        wait = row.inner("first_token") if row.values.get("first_token") else None
        waits = (wait.number("p50"), wait.number("p99")) if wait else None
        clients = row.count("clients") if "clients" in row else None
        setting = re.sub(r"^\d+ clients, ", "", row.text("traffic", "")) + threads
        over = "clients" if clients else "trace"
        yield Throughput(
            source, device, model, setting, series, over, clients, row.number(_SPEED), memory, waits, whose
        )


def read_vllm(file: Fields, source: Source) -> Iterator[Row]:
    """Read bench/serving/vllm_cpu.py's: decode steps in vLLM, its own kernels and Crelle's taking turns."""
    speeds = file.inner(_SPEED)
    model = f"{file.count('layers')} layers in vLLM {file.text('vllm')}"
    for engine in speeds.values:
        batches = speeds.inner(engine)
        whose = PEER if engine.startswith("vllm") else OURS
        for batch in batches.values:
            if not batch.isdecimal():
                continue
            names = cpu_device(file), model, _threads(file), engine, "batch", int(batch)
            yield Throughput(source, *names, batches.number(batch), whose=whose)


def read_attention(file: Fields, source: Source) -> Iterator[Row]:
    """Read crelle bench attention's, and the older form of it."""
    for row in file.rows("rows"):
        setting = f"{row.count('heads')} heads, {row.count('kv_heads')} of keys"
        if "cudnn_us" in row:
            torch = {name: row.number(f"{name}_us") for name in ("cudnn", "flash") if f"{name}_us" in row}
            kv, ours, device = row.text("cache"), row.number("us"), gpu_name(file)
        else:
            times = row.inner("torch_microseconds")
            torch = {name: times.number(name) for name in times.values}
            kv, ours, device = row.text("kv"), row.number("microseconds"), _device(row, file)
        if not torch:
            continue
        fastest = min(torch, key=lambda name: torch[name])
        sizes = row.count("batch"), row.count("context")
        yield Attention(source, device, setting, kv, *sizes, ours, torch[fastest], fastest)


def _device(row: Fields, file: Fields) -> str:
    name = row.text("device")
    return cpu_device(file) if name == "cpu" else name


def _threads(row: Fields) -> str:
    threads = row.count("threads")
    return f"{threads} thread" + "s" * (threads > 1)


def _peers(row: Fields) -> dict[str, float]:
    peers = row.inner_or_empty("peers")
    return {name: peers.number(name) for name in peers.values}


def _whose(scheme: str) -> str:
    return REFERENCE if scheme == "fp16" else OURS
