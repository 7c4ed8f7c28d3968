"""Runs jobs in vLLM, one model after the other: JSON from standard input, one line of JSON for each on standard output.

In a process of its own, because vLLM warns, spawns and keeps global state; by default the engine runs in this very
process (5 s for a model instead of 60), with VLLM_ENABLE_V1_MULTIPROCESSING=1 as users have it.
"""

import gc
import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# vLLM writes to standard output too: results go where it was, everything else to standard error.
RESULTS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def run(job: dict[str, Any]) -> list[list[int]]:
    """Return the greedy tokens behind each prompt, a text or tokens."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    plain = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 26, "max_model_len": 96, "enforce_eager": True}
    llm = LLM(model=job["model"], **plain | job.get("options", {}))
    prompts = [p if isinstance(p, str) else TokensPrompt(prompt_token_ids=p) for p in job["prompts"]]
    greedy = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    adapter = LoRARequest("adapter", 1, job["adapter"]) if "adapter" in job else None
    answers = llm.generate(prompts, greedy, use_tqdm=False, lora_request=adapter)
    return [list(out.outputs[0].token_ids) for out in answers]


def main() -> None:
    for job in json.load(sys.stdin):
        try:
            answer: dict[str, Any] = {"tokens": run(job)}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        gc.collect()
        print(json.dumps(answer), file=RESULTS, flush=True)


if __name__ == "__main__":
    main()
