"""crelle serve, whose CUDA context is destroyed in the next step after SIGUSR1: a kernel writes where nothing is.

On a CPU the step raises what torch raises then. Arguments are those of `crelle`.
"""

import faulthandler
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crelle.cli.main import main
from crelle.engine.model_runner import ModelRunner

FAULT = "namespace test { __global__ void fault(int value) { *reinterpret_cast<volatile int*>(16) = value; } }"
asked = threading.Event()


def destroy_context() -> None:
    """Compile and launch the kernel as ours are; the launch itself succeeds, and what comes after it fails."""
    from crelle.kernels.cuda import jit, launch

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "fault.cu").write_text(FAULT)
        own, jit.SOURCES = jit.SOURCES, Path(folder)
        try:
            kernel = launch.load("fault.cu", "test::fault")
        finally:
            jit.SOURCES = own
    kernel((1, 1, 1), 1, 7)


def faulty(work: Callable[[ModelRunner, Any], Any]) -> Callable[[ModelRunner, Any], Any]:
    def wrapped(self: ModelRunner, step: Any) -> Any:
        if asked.is_set():
            asked.clear()
            faulthandler.dump_traceback_later(60, exit=False)  # what waits, if the process does not end
            if "cuda" not in sys.argv:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with …")
            destroy_context()
        return work(self, step)

    return wrapped


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: asked.set())
    ModelRunner.run, ModelRunner.start = faulty(ModelRunner.run), faulty(ModelRunner.start)  # type: ignore[method-assign]
    main()
