"""Result files about quality: bench/quality/quality.py, zero-shot tasks, ablations, caches, the demo, peers."""

from collections.abc import Iterator
from dataclasses import replace

from crelle.bench.report.fields import Fields
from crelle.bench.report.rows import Ablation, Accuracy, CacheQuality, LeftOut, Quality, Quantizing, Row, Source, Step
from crelle.bench.report.sources import cpu_device, gpu_name, model_name, text_name

# Which texts bench/quality/quality.py calls test and unseen; newer files say so themselves.
_QUALITY_TEXTS = {
    "SmolLM2-135M": {"test": "WikiText-2", "unseen": "TinyStories"},
    "stories15M": {"test": "TinyStories", "unseen": "WikiText-2"},
}


def read_quality(file: Fields, source: Source) -> Iterator[Row | LeftOut]:
    """Read bench/quality/quality.py's and its like: perplexity of each text that full precision was evaluated on."""
    model = model_name(file.text("model", source.command), source.file)
    texts = file.inner_or_empty("texts")
    for row in file.rows("rows"):
        own = replace(source, command=row.text("command", source.command))
        scheme, bits = row.text("scheme"), row.number_or_none("bits_per_weight") or row.number_or_none("bits")
        if bits is None:
            yield LeftOut(source.file, f"{row.where}, {scheme}: it has no bits per weight")
            continue
        for what in file.inner("fp32").values:
            text = text_name(texts.text(what, _QUALITY_TEXTS.get(model, {}).get(what, what)))
            yield Quality(own, model, text, scheme, bits, row.number(f"{what}_ratio"), row.number(what))


def read_zero_shot(file: Fields, source: Source) -> Iterator[Row]:
    """Read bench/quality/zero_shot.py's: accuracy on tasks, and perplexity, each relative to the row of fp16."""
    model = model_name(file.text("model", source.file))
    plain = next((row for row in file.rows("rows") if row.text("scheme") == "fp16"), None)
    for row in file.rows("rows"):
        scheme, bits, tasks = row.text("scheme"), row.number("bits_per_weight"), row.inner("tasks")
        scores = {}
        for task in tasks.values:
            score = tasks.inner(task)
            scores[task] = score.number("accuracy", zero=True), score.number("stderr", zero=True)
        if scores:
            yield Accuracy(source, model, scheme, bits, scores)
        if plain and row.has("perplexity") and plain.has("perplexity"):
            perplexity = row.number("perplexity")
            text = "WikiText-2"  # the harness evaluates on no other
            yield Quality(source, model, text, scheme, bits, perplexity / plain.number("perplexity"), perplexity)


def read_texts(file: Fields, source: Source) -> Iterator[Row]:
    """Read bench/quality/atom_quality.py's, a row for each scheme, cache and text: those with a 16-bit cache."""
    model = model_name(file.text("model", source.file))
    for row in file.rows("rows"):
        if row.text("kv") not in ("16", "kv16") or "bits_per_weight" not in row:
            continue
        text, bits = text_name(row.text("text")), row.number("bits_per_weight")
        yield Quality(source, model, text, row.text("scheme"), bits, row.number("ratio"), row.number("perplexity"))


def read_ablation(file: Fields, source: Source) -> Iterator[Row]:
    model = model_name(file.text("model"))
    for row in file.rows("rows"):
        bits = row.number("bits_per_weight", zero=True)  # 0: as it is
        yield Ablation(source, model, row.text("name"), bits, row.number("ratio"))


def read_cache(file: Fields, source: Source) -> Iterator[Row]:
    """Read bench/quality/kv_quality.py's."""
    model = model_name(file.text("model"))
    for row in file.rows("rows"):
        bits, perplexity = row.number("bits_per_value"), row.number("perplexity")
        yield CacheQuality(source, model, row.text("kv"), bits, row.number("ratio"), perplexity)


def read_demo(file: Fields, source: Source) -> Iterator[Row]:
    """Read crelle demo's: size, perplexity and speed in one run, fp16 first, then what they are compared with."""
    rows, compared = list(file.rows("rows")), list(file.rows("compared")) if "compared" in file else []
    model, plain = model_name(file.text("model", "SmolLM2-135M")), rows[0].number("perplexity")
    for row in (*rows, *compared):
        scheme, bits, perplexity = row.text("scheme"), row.number("bits_per_weight"), row.number("perplexity")
        yield Quality(source, model, "the demo's text", scheme, bits, perplexity / plain, perplexity)
        if "machine" in file and "tokens_per_second" in row:  # a speed says nothing without its machine
            size, speed = 1e6 * row.number("megabytes"), row.number("tokens_per_second")
            yield Step(source, gpu_name(file) or cpu_device(file), model, scheme, "crelle demo", 1, speed, size)


def read_peers(file: Fields, source: Source) -> Iterator[Row]:
    """Read what others' packages reached, written by hand: {"peers": [{who, model, text, bits_per_weight, ratio, …}]}.

    A peer's figure without its machine is refused.
    """
    for row in file.rows("peers"):
        machine = row.text("machine") if "machine" in row or "machine" not in file else source.machine
        own = replace(source, command=row.text("command", source.command), machine=machine)
        who, bits, ratio = row.text("who"), row.number("bits_per_weight"), row.number("ratio")
        model, text = model_name(row.text("model")), text_name(row.text("text"))
        yield Quality(own, model, text, row.text("scheme", who), bits, ratio, row.number_or_none("perplexity"), who)


def read_quantizing(file: Fields, source: Source) -> Iterator[Row]:
    """Read bench/quantize.py's."""
    for row in file.rows("rows"):
        bits, seconds = row.number("bits_per_weight"), row.number("seconds")
        yield Quantizing(source, model_name(file.text("model", source.file)), row.text("scheme"), seconds, bits)


def read_bench_quantize(file: Fields, source: Source) -> Iterator[Row]:
    """Read crelle bench quantize's: some layers are timed, the whole model is extrapolated."""
    seconds, bits = file.inner("extrapolated").number("seconds"), file.number("bits_per_weight")
    yield Quantizing(source, file.text("model"), file.text("scheme"), seconds, bits, extrapolated=True)
