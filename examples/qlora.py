"""QLoRA: adapters of rank 8 learn a text over a model of 4 bits, on a CPU or a GPU. Needs peft.

python examples/qlora.py                                   a tiny random model, seconds
python examples/qlora.py MODEL TEXT [STEPS]                a Hugging Face directory and a text file
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import crelle

ROWS, LENGTH = 4, 128  # of a batch


def tiny_model(to: Path) -> Path:
    """A random model whose tokens are bytes."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(to)
    return to


def main(source: Path | None = None, text: str = "", steps: int = 30) -> list[float]:
    """Quantize, train adapters, save and load them; return the losses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if source is None:
            source, ids = tiny_model(folder / "tiny"), list(b"All that glitters is not gold. " * 400)
        else:
            ids = AutoTokenizer.from_pretrained(source)(text)["input_ids"]
        made = crelle.quantize(source, folder / "q4", "rtn:bits=4,group=32").out
        base = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).to(device)
        print(f"{base.num_parameters():,} parameters in 4 bits")
        model: Any = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        model.print_trainable_parameters()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        whole = len(ids) // LENGTH
        rows = torch.tensor(ids[: whole * LENGTH]).view(whole, LENGTH)
        losses = []
        for step in range(steps):
            batch = rows[torch.arange(step * ROWS, (step + 1) * ROWS) % whole].to(device)
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % 10 == 0 or step == steps - 1:
                print(f"step {step:3}  loss {losses[-1]:.4f}")
        model.save_pretrained(folder / "adapter")
        again = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).to(device)
        adapted = PeftModel.from_pretrained(again, folder / "adapter")
        with torch.no_grad():
            print(f"loaded again: loss {adapted(batch, labels=batch).loss.item():.4f}")
    return losses


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) < 2:
        main()
    else:
        main(Path(given[0]), Path(given[1]).read_text(encoding="utf-8")[:400_000], *map(int, given[2:3]))
