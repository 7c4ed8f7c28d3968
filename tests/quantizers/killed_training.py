"""Runs that train and are killed in the middle of it, resumed and killed again, until one ends.

    python killed_training.py MODEL DIRECTORY JSON

JSON: {"scheme": …, "device": …, "kills": [["step", 6], ["save", 2]], "low_memory": false, "length": 32}. Each kill is
of another run, which resumes the one before: in its sixth step of training, or half way through saving its state for
the second time. Prints whether the bytes are those of an undisturbed run, and the steps that each run took.
"""

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # by optimizers: here once, and not in every child
from crash_points import contents, in_a_child

from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize
from crelle.quantizers.training import finetune
from crelle.quantizers.training.adam8 import LowMemoryStep
from crelle.quantizers.training.blockwise import TrainStep
from crelle.quantizers.training.end_to_end import EndToEnd

TEXT = "It was a small text to calibrate on, and to train on as well. " * 100


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def count_steps(file: Path, die_at: int | None) -> None:
    """Write the number of steps that this process takes to a file, and kill it in one of them.

    On a CPU that is between the gradients and the update of the scales, in low memory with the weights updated
    already; on a GPU after the launch, with the step under way.
    """
    taken = 0

    def began() -> bool:
        nonlocal taken
        taken += 1
        file.write_text(str(taken))
        return taken == die_at

    clip = torch.nn.utils.clip_grad_norm_

    def mortal_clip(*args: Any, **named: Any) -> Any:
        if not torch.cuda.is_initialized() and began():
            kill()
        return clip(*args, **named)

    def mortal_step(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            found = call(*args, **named)
            if torch.cuda.is_initialized() and began():
                kill()
            return found

        return wrapped

    torch.nn.utils.clip_grad_norm_ = mortal_clip
    for kind in (TrainStep, LowMemoryStep):
        kind.__call__ = mortal_step(kind.__call__)  # type: ignore[method-assign]


def die_while_saving(time: int) -> None:
    """Kill this process when half of a state is written, at that time of saving one."""
    save, saved = torch.save, 0

    def mortal_save(state: object, file: Any) -> None:
        nonlocal saved
        saved += 1
        if saved < time:
            return save(state, file)
        whole = io.BytesIO()
        save(state, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        return kill()

    torch.save = mortal_save


def main(model: str, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    EndToEnd.run.__defaults__ = (None, None, 0.0)  # state, progress, save_every: saved after every tenth step
    if options.get("low_memory"):
        finetune.too_large_for = lambda *_, **__: True
    text = CalibrationData(text=TEXT, rows=4, length=options.get("length", 32))
    steps: list[int] = []

    def start(out: Path, dies: tuple[str, int] | None, resume: bool = False) -> int:
        counted = directory / "steps"
        counted.write_text("0")

        def work() -> None:
            count_steps(counted, dies[1] if dies and dies[0] == "step" else None)
            if dies and dies[0] == "save":
                die_while_saving(dies[1])
            quantize(model, out, options["scheme"], text=text, device=options["device"], resume=resume)

        code = in_a_child(work)
        steps.append(int(counted.read_text()))
        return code

    whole, killed = directory / "whole", directory / "killed"
    assert start(whole, None) == 0
    for i, dies in enumerate(options["kills"]):
        assert start(killed, tuple(dies), resume=i > 0) == -signal.SIGKILL
        assert not killed.exists()
    assert start(killed, None, resume=True) == 0
    same = {name: data == contents(whole).get(name) for name, data in contents(killed).items()}
    left = sorted(p.name for p in directory.iterdir())
    return {"same": same, "steps": steps, "left": left}


if __name__ == "__main__":
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))))
