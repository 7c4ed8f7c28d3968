"""Hashes of a model's logits, to show that a change of the tree changes no bit of them.

    python bench/trees/logits.py record CHECKPOINTS FILE   quantize into CHECKPOINTS where it is empty; write the hashes
    python bench/trees/logits.py check CHECKPOINTS FILE       compute them again from the same checkpoints and compare

Every case is a prompt in one pass, then single tokens, by the model's own forward; then requests of several lengths in
one engine. Bits depend on the instruction set, on torch and on its number of threads, so the file is for one machine.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch

from crelle import LLM, CalibrationData, Sampling, quantize
from crelle.eval.smollm2 import smollm2
from crelle.kernels import cpu
from crelle.kernels.threads import set_threads

SCHEMES = {"rtn4": "rtn:bits=4", "bcq3": "bcq:bits=3", "nested": "bcq-nested:bits=4,data=false", "gptq3": "gptq:bits=3"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    set_threads(2)
    models = {"stories15M": (lambda: args.data / "stories15M", 32, 250), "smollm2": (smollm2, 64, 400)}
    found: dict[str, str] = {"machine": f"{cpu.core().isa()}, torch {torch.__version__}, 2 threads"}
    for name, (find, group, tokens) in models.items():
        if not name.startswith(args.only.split(" ")[0]):
            continue
        source = find()
        for label in ("fp32", *SCHEMES):
            path = source
            if label != "fp32":
                path = args.checkpoints / f"{name}-{label}"
                if not path.exists():
                    text = CalibrationData(
                        text=(args.data / "text/tinystories-calibration.txt").read_text()[:60000], rows=8, length=128
                    )
                    quantize(source, path, f"{SCHEMES[label]},group={group}", text=text, device="cpu")
            for kv in ("16", "4"):
                for bits in (4, 3, 2) if label == "nested" else (None,):
                    key = f"{name} {label}{'' if bits is None else f' at {bits}'} kv {kv}"
                    if args.only in key:
                        found[key] = logits(path, kv, bits, tokens)
                        print(key, found[key], flush=True)
    if args.what == "record":
        args.file.write_text(json.dumps(found, indent=1) + "\n")
        return
    before = json.loads(args.file.read_text())
    wrong = [key for key, value in found.items() if before.get(key) != value]
    print("all equal" if not wrong else f"differ: {', '.join(wrong)}")
    sys.exit(bool(wrong))


@torch.inference_mode()
def logits(path: Path, kv: str, bits: int | None, tokens: int) -> str:
    """Return the hashes of a prompt's logits, of single steps', and of the tokens that an engine gives."""
    llm = LLM.load(path, device="cpu", kv=kv, bits=bits)
    model = llm.model
    ids = torch.randint(0, 3000, (1, tokens - 12), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(kv=llm.kv)
    prompt = model(ids, cache)
    steps, token = [], prompt[0, -1].argmax()
    for _ in range(8):
        out = model(token.view(1, 1), cache)
        steps.append(out)
        token = out[0, -1].argmax()
    prompts = [ids[0, :n].tolist() for n in (1, 7, 40)]
    said = [c.tokens for c in llm.generate(prompts, Sampling(max_tokens=8))]
    parts = (prompt, torch.stack(steps), torch.tensor([t for tokens in said for t in tokens]))
    return " ".join(hashlib.sha256(p.contiguous().numpy().tobytes()).hexdigest()[:12] for p in parts)


if __name__ == "__main__":
    main()
