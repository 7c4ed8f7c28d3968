"""AlphaTuning on two tasks: scales of quantized matrices, against tuning a 16-bit model whole and by LoRA.

    python bench/quality/alpha_tuning.py OUT.json DATA [--steps 40] [--batch 16] [--bits 2 3 4] [--groups 64]

all-MiniLM-L6-v2 and STS-B's dev set (DATA/sts-b/dev.tsv), split so that no sentence is on both sides: 2/3 to train on,
half of the rest to choose each method's learning rate by (once, at the first bits), the other half to score. Two tasks:
how alike two sentences are (Spearman), and what a sentence is from, captions, forums or news (accuracy, by the nearest
label's embedding).

    tuned 16-bit     all weights of the layers' 36 matrices, stored in f16; `+ bits`: quantized after that
    LoRA             W + B A of rank 4 beside f16 weights
    AlphaTuning      binary codes (bcq) of the untuned model; only scales train: `crelle tune --task`

Bytes are those of the 36 matrices: all of them, and what a second task adds. Each method has the same steps, batches
and loss. At the end scales are exchanged in one checkpoint: its embeddings must be those of the tuned one, bit for bit.
"""

import argparse
import csv
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from stsb import PACKAGE, minilm
from torch import Tensor, nn

from crelle import Embedder, quantize
from crelle.bench.environment import write_result
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.eval.embedding_task import task_score
from crelle.formats.base import format_of, nbytes
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights
from crelle.formats.storage.task_scales import save_scales
from crelle.models.calibration_model import open_model
from crelle.quantize_job.task import Task, tune_task
from crelle.quantizers.training.blockwise import Training
from crelle.quantizers.training.embedding_task import TaskTraining
from crelle.quantizers.training.end_to_end import Network

CPU, LENGTH = torch.device("cpu"), 64
RATES = {"tuned 16-bit": (3e-5, 1e-4), "LoRA": (1e-3, 3e-3), "AlphaTuning": (1e-3, 1e-2)}


class Whole(nn.Module):
    """A weight of which all values train."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(weight.clone())

    def forward(self) -> Tensor:
        return self.w


class LoRA(nn.Module):
    """W + B A: a change of low rank, which begins at zero."""

    def __init__(self, weight: Tensor, rank: int = 4) -> None:
        super().__init__()
        seeded = torch.Generator().manual_seed(0)
        self.weight = weight
        self.w_a = nn.Parameter(torch.randn(rank, weight.shape[1], generator=seeded) * weight.shape[1] ** -0.5)
        self.w_b = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self) -> Tensor:
        return self.weight + self.w_b @ self.w_a


def parts(path: Path) -> list[list[dict[str, str]]]:
    """Return the rows to train on, to choose by and to score; no sentence is in two of them."""
    with path.open(encoding="utf-8") as f:
        rows = list(csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE))
    group: dict[str, str] = {}

    def root(s: str) -> str:
        while group.setdefault(s, s) != s:
            s = group[s]
        return s

    for row in rows:
        group[root(row["sentence1"])] = root(row["sentence2"])
    roots = sorted({root(row["sentence1"]) for row in rows})
    order = torch.randperm(len(roots), generator=torch.Generator().manual_seed(0)).tolist()
    place = {roots[i]: 0 if j < 4 * len(roots) // 6 else 1 + (j % 2) for j, i in enumerate(order)}
    return [[row for row in rows if place[root(row["sentence1"])] == part] for part in range(3)]


def tasks(rows: Sequence[dict[str, str]]) -> dict[str, Task]:
    """Return both tasks of some rows."""
    first, second = (tuple(row[name] for row in rows) for name in ("sentence1", "sentence2"))
    kinds = tuple(row["genre"].removeprefix("main-") for row in rows)
    return {
        "similarity": Task(first, second, tuple(float(row["score"]) / 5 for row in rows)),
        "source": Task(first + second, kinds + kinds, None),
    }


class Bench:
    """A task, tuned in several ways."""

    def __init__(self, name: str, split: Sequence[dict[str, Task]], source: Path, t: Training, work: Path) -> None:
        self.name, self.source, self.t, self.work = name, source, t, work
        self.train, self.choose, self.test = (part[name] for part in split)
        self.rates: dict[str, Sequence[float]] = dict(RATES)

    def scores(self, model: Path) -> tuple[float, float]:
        """Return the scores of the part to choose by, and of the test."""
        embedder = Embedder.load(model, device="cpu")
        found = [task_score(embedder, part, self.train.labels, LENGTH) for part in (self.choose, self.test)]
        return found[0], found[1]

    def best(self, method: str, tune: Callable[[Training], tuple[Path, int]]) -> dict[str, Any]:
        """Tune at each rate, or at the one that was found; return what the best one on the part to choose by has."""
        found = []
        for rate in self.rates[method]:
            made, trained = tune(replace(self.t, rate=rate, scale_rate=rate))
            chosen, test = self.scores(made)
            found.append({"chosen": chosen, "score": test, "trained": trained, "rate": rate, "path": made})
        best = max(found, key=lambda row: float(row["chosen"]))
        self.rates[method] = (best["rate"],)
        return best

    def of_16_bits(self, coder: Callable[[Tensor], nn.Module], name: str) -> Callable[[Training], tuple[Path, int]]:
        """Return what tunes the source's matrices by such modules, and writes a model directory in f16."""

        def tune(t: Training) -> tuple[Path, int]:
            weights = open_weights(self.source)
            coders: dict[str, nn.Module] = {}
            network = Network.of(open_model(weights, CPU))
            for block in network.blocks:
                for module, linear in block.linears().items():
                    coders[module] = linear.coder = coder(linear.weight)
            tokens = self.train.tokens(Tokenizer.of(weights), LENGTH)
            TaskTraining(network, list(coders.values()), tokens, t, CPU).run()
            changed = {f"{m}.weight": c().detach().half().float().contiguous() for m, c in coders.items()}
            to = self.work / f"{self.name}-{name}-{t.rate:g}"
            to.mkdir(exist_ok=True)
            kept = {n: changed.get(n, weights.read(n)) for n in weights.names()}
            safetensors.torch.save_file(kept, to / "model.safetensors", metadata={"format": "pt"})
            (to / "config.json").write_bytes((self.source / "config.json").read_bytes())
            weights.copy_tokenizer(to)
            return to, sum(p.numel() for c in coders.values() for p in c.parameters())

        return tune

    def alpha(self, base: Path) -> Callable[[Training], tuple[Path, int]]:
        def tune(t: Training) -> tuple[Path, int]:
            to = self.work / f"{self.name}-{base.name}-{t.rate:g}"
            report = tune_task(base, self.train, to, t, length=LENGTH, device="cpu")
            return report.out, report.trained

        return tune


def stored(path: Path) -> int:
    """Return the bytes of the layers' matrices."""
    weights = Checkpoint(path)
    return sum(nbytes(weights.matrix(m)) for m, spec in weights.specs.items() if format_of(spec).quantized)


def exchange(base: Path, tuned: Path, texts: Sequence[str], scales: Path) -> dict[str, Any]:
    """Put the scales of a task into its base; embeddings must be those of the tuned checkpoint."""
    size = save_scales(Checkpoint(tuned), Checkpoint(base), scales)
    begun = time.perf_counter()
    switched = Embedder.load(base, scales=scales, device="cpu")
    seconds = time.perf_counter() - begun
    if not torch.equal(switched.embed(texts), Embedder.load(tuned, device="cpu").embed(texts)):
        raise SystemExit(f"{base.name} with {scales.name} does not embed as {tuned.name} does")
    return {"task_bytes": size, "switch_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--groups", nargs="+", default=["64"], help="inputs that share scales, or row")
    args = parser.parse_args()
    source, split = minilm(), parts(args.data / "sts-b" / "dev.tsv")
    counts = [len(rows) for rows in split]
    by_task = [tasks(rows) for rows in split]
    rows: list[dict[str, Any]] = []
    options = f"--steps {args.steps} --batch {args.batch} --bits {' '.join(map(str, args.bits))}"
    command = f"python bench/quality/alpha_tuning.py OUT.json DATA {options} --groups {' '.join(args.groups)}"
    facts = {"model": PACKAGE, "pairs": dict(zip(("train", "choose", "test"), counts, strict=True)), "rates": RATES}

    def add(**row: Any) -> None:
        row.pop("path", None)
        rows.append(row)
        write_result(args.out, {"command": command, **facts, "rows": rows})
        print(", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

    with tempfile.TemporaryDirectory() as at:
        work = Path(at)
        schemes = {f"bcq:bits={b},group={g}": work / f"bcq-{b}-{g}" for b in args.bits for g in args.groups}
        for scheme, to in schemes.items():
            quantize(source, to, scheme, device="cpu")
        matrices = [m for m, spec in Checkpoint(next(iter(schemes.values()))).specs.items() if ".layer." in m and spec]
        whole = 2 * sum(open_weights(source).read(f"{m}.weight").numel() for m in matrices)
        t = Training(steps=args.steps, batch=args.batch)
        for name in by_task[0]:
            bench = Bench(name, by_task, source, t, work)
            metric = "accuracy" if bench.train.labels else "spearman"
            same: dict[str, Any] = {"task": name, "metric": metric}
            add(**same, method="untuned", bits=32, score=bench.scores(source)[1], trained=0, bytes=2 * whole)
            full = bench.best("tuned 16-bit", bench.of_16_bits(Whole, "full"))
            add(**same, method="tuned 16-bit", bits=16, bytes=whole, task_bytes=whole, **full)
            lora = bench.best("LoRA", bench.of_16_bits(LoRA, "lora"))
            size = 2 * lora["trained"]
            add(**same, method="LoRA", bits=16, bytes=whole + size, task_bytes=size, **lora)
            for scheme, base in schemes.items():
                fact = {**same, "scheme": scheme, "bytes": stored(base)}
                add(**fact, method="untuned", score=bench.scores(base)[1], trained=0)
                after = quantize(full["path"], work / f"{name}-after-{base.name}", scheme, device="cpu").out
                size = stored(base)
                add(**fact, method="tuned 16-bit + bits", score=bench.scores(after)[1], task_bytes=size)
                found = bench.best("AlphaTuning", bench.alpha(base))
                exchanged = exchange(base, found["path"], bench.test.texts, work / f"{name}-{base.name}.safetensors")
                add(**fact, method="AlphaTuning", **found, **exchanged)


if __name__ == "__main__":
    main()
