"""Fetches the demo model and generates, with an installed Crelle: how a wheel is tested, here and by cibuildwheel.

Prints one JSON object: the instruction set of the compiled core, seconds of the model's download, seconds from the
start of this program to the first token (imports included), and the text. Fails where the C++ kernels do not run.
"""

import json
import os
import sys
import time

PROMPT = "The capital of France is"


def main() -> None:
    """Time from here, since importing torch is part of what a user waits for."""
    started = time.perf_counter()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from crelle import LLM, Sampling, __version__
    from crelle.eval.smollm2 import smollm2
    from crelle.kernels import cpu

    if reason := cpu.available():
        sys.exit(f"the wheel's C++ extension {reason}")
    before = time.perf_counter()
    model = smollm2()
    fetched = time.perf_counter() - before
    first, text = 0.0, ""
    for chunk in LLM.load(model).stream(PROMPT, Sampling(max_tokens=16, temperature=0.0)):
        first = first or time.perf_counter() - started
        text += chunk.text
    if "Paris" not in text:
        sys.exit(f"the model continues '{PROMPT}' with '{text}', not with Paris: the kernels compute something else")
    found = {"crelle": __version__, "isa": cpu.core().isa(), "download_seconds": round(fetched, 2)}
    print(json.dumps({**found, "first_token_seconds": round(first, 2), "text": text}))


if __name__ == "__main__":
    main()
