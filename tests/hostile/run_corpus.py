"""Runs hostile cases one after the other, each through every way into the loader; one JSON line a case.

A process of its own: its address space is limited, its standard input says yes to everything, and foreign code that
runs in it leaves a mark.
"""

# ruff: noqa: E402  (the paths come first)
import ctypes
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "support")]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import corpus
import torch
import transformers.convert_slow_tokenizer  # so that its imports are not counted as some case's time
import transformers.generation.utils
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto  # noqa: F401
from in_process import run

from crelle.engine.llm import LLM
from crelle.engine.sampling.sampler import Sampling
from crelle.errors import CrelleError

GIGABYTE = 1 << 30
TALK = [{"role": "user", "content": "Hi"}]


def load(path: Path) -> str:
    """Load, continue a prompt, and answer in a chat where there is a template."""
    try:
        llm = LLM.load(path, device="cpu")
        llm.generate("Hi", Sampling(max_tokens=2))
        llm.tokenizer.encode_chat(TALK)
    except CrelleError as e:
        return "" if "no chat template" in str(e) else str(e)
    return ""


def command(*args: object) -> str:
    """A command's sentence; empty where it succeeded."""
    done = run(*args, stdin="Hello\ny\ny\ny\n")
    if done.code not in (0, 2) or (done.code == 2 and not done.err.strip()):
        raise AssertionError(f"{args[0]} ended with {done.code}: {done.err[-500:]}")
    return done.err.strip() if done.code else ""


def attempt(what: Callable[[], str]) -> dict[str, object]:
    began = time.process_time()
    try:
        said, fault = what(), None
    except BaseException as e:
        said, fault = "", f"{type(e).__name__}: {e!s:.300}"
    return {"said": said[:2000], "length": len(said), "fault": fault, "seconds": time.process_time() - began}


def forget_peak() -> None:
    """Begin anew with the peak: what cases before left to the allocator is given back, as far as it goes."""
    gc.collect()
    gc.freeze()  # what is still in use is not searched again for every case
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> int:
    """Return bytes of memory: now (VmRSS), or at most since `forget_peak` (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) << 10


def main() -> None:
    torch.set_num_threads(1)
    with open("/proc/self/statm") as f:
        size = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2 * GIGABYTE, -1))
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # KeyboardInterrupt: a fault like any other
    mark, libraries = Path(os.environ[corpus.MARK]), memory("VmRSS")  # a torch with CUDA takes half a gigabyte more
    for name in sys.argv[1:] or list(corpus.CASES):
        build, _ = corpus.CASES[name]
        with tempfile.TemporaryDirectory(prefix="crelle-hostile-") as d:
            path = build(Path(d) / "m")
            forget_peak()
            os.chdir(path if path.is_dir() else path.parent)  # where Python would look for modules
            ways: dict[str, Callable[[], str]] = {"load": partial(load, path)}
            if not name.startswith("tokenizer"):
                ways["inspect"] = partial(command, "inspect", path, "--json")
                ways["quantize"] = partial(command, "quantize", path, Path(d) / "out", "--scheme", "rtn:bits=4,group=8")
            elif "template" not in name:
                ways["chat"] = partial(command, "chat", path, "--max-tokens", 1)
            found = {}
            for how, what in ways.items():
                signal.alarm(20)
                found[how] = attempt(what)
                signal.alarm(0)
            os.chdir("/")
            shutil.rmtree(Path(d) / "m", ignore_errors=True)
        grown = memory("VmHWM") - libraries
        print(json.dumps({"case": name, "ways": found, "code_ran": mark.exists(), "peak": grown}), flush=True)
        mark.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
