"""Processes that work on one model together, one for each device; the process that starts them only watches.

All of them run the same function (crelle.quantizers.ranks says how they communicate). The first one reports progress,
and what it returns is the result. If one fails or is killed, all others are killed, and one error is raised. They are
also killed when the process that watches them ends, in whatever way: none of them goes on unseen.
"""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch

from crelle.errors import CrelleError, ProcessError
from crelle.kernels.threads import set_threads
from crelle.quantize_job.rank_devices import RankDevice, chosen
from crelle.quantizers.calibration.layer_api import Progress
from crelle.quantizers.ranks import join

_GRACE = 1.0  # seconds: when a rank dies, others may tell of a lost connection before its death is seen
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class _Job:
    """What a process gets on its standard input."""

    work: Callable[..., Any]
    arguments: Mapping[str, Any]
    rank: int
    size: int
    device: str  # the process's own: cpu or cuda
    threads: int
    parent: int


class _Rank:
    """A process, and what it has said."""

    def __init__(self, job: _Job, device: RankDevice, store: int) -> None:
        self.name = f"rank {job.rank} ({device})"
        self.error: CrelleError | None = None
        self.trace: str | None = None  # of an exception that is not for the user
        self.done = False
        self.result: Any = None
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self.messages, theirs = connection.Pipe(duplex=False)
        code = f"from crelle.quantize_job.rank_processes import main; main({theirs.fileno()}, {store})"
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),  # what this process can import, that one can
            **device.environment(),
        }
        with tempfile.TemporaryFile() as stdin:  # not a pipe: that would have to wait until the process reads it
            pickle.dump(job, stdin)
            stdin.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=self.stderr,
                pass_fds=(theirs.fileno(), store),
                env=environment,
            )
        theirs.close()

    def hear(self, progress: Progress | None) -> bool:
        """Take a message; return whether more may come."""
        try:
            kind, content = pickle.loads(self.messages.recv_bytes())
        except (EOFError, OSError):
            return False
        if kind == "progress" and progress is not None:
            progress(*content)
        elif kind == "done":
            self.done, self.result = True, content
        elif kind == "error":
            self.error = content
        elif kind == "trace":
            self.trace = content
        return True

    def how_it_ended(self) -> str:
        """Return what is known of a process that ended without a word."""
        status = self.process.wait()
        if status == -signal.SIGKILL:
            return "was killed (SIGKILL: by a user, or by Linux because memory ran out)"
        self.stderr.seek(0)
        last = self.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        how = f"was terminated by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return f"{how} ({last})" if last else how

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.messages.close()
        self.stderr.close()


def on_devices(
    work: Callable[..., Any],
    devices: Sequence[RankDevice],
    device: str,
    arguments: Mapping[str, Any],
    progress: Progress | None = None,
) -> Any:
    """Call work(device=…, progress=…, **arguments): here where there is one device, else in a process for each."""
    if len(devices) > 1:
        return run_ranks(work, devices, arguments, progress)
    with chosen(devices, device) as one:
        return work(device=one, progress=progress, **arguments)


def run_ranks(
    work: Callable[..., Any],
    devices: Sequence[RankDevice],
    arguments: Mapping[str, Any],
    progress: Progress | None = None,
) -> Any:
    """Call work(device=…, progress=…, **arguments) in a process for each device and return what the first returns.

    `work` is a function of a module, and it and its arguments can be pickled.
    """
    store = os.memfd_create("crelle-ranks")  # where the processes find each other: no file is left behind, no port open
    threads = max(1, torch.get_num_threads() // len(devices))
    ranks: list[_Rank] = []
    try:
        for rank, device in enumerate(devices):
            job = _Job(work, arguments, rank, len(devices), device.kind, threads, os.getpid())
            ranks.append(_Rank(job, device, store))
        _watch(ranks, progress)
        return ranks[0].result
    finally:
        for one in ranks:
            one.end()
        os.close(store)


def _watch(ranks: Sequence[_Rank], progress: Progress | None) -> None:
    """Wait until all ranks are done; raise the error that explains why they are not."""
    open_ends: dict[Any, _Rank] = {rank.messages: rank for rank in ranks}
    silent: list[_Rank] = []  # ended without a result or an error
    failed: list[_Rank] = []  # by an exception that is not for the user: the first one lets the others fail too
    until: float | None = None
    while open_ends and (until is None or time.monotonic() < until):
        for end in connection.wait(list(open_ends), None if until is None else max(0.0, until - time.monotonic())):
            rank = open_ends[end]
            if not rank.hear(progress):
                del open_ends[end]
                if not (rank.done or rank.error or rank.trace):
                    silent.append(rank)
            elif rank.trace:
                failed.append(rank)
        if silent or any(rank.error for rank in ranks):
            break
        if until is None and failed:
            until = time.monotonic() + _GRACE
    if error := next((rank.error for rank in ranks if rank.error), None):
        raise error
    if silent:
        raise ProcessError(
            f"{silent[0].name} {silent[0].how_it_ended()}, so the others were stopped; finished shards are kept, run "
            "again with `resume=True`"
        )
    if failed:
        raise RuntimeError(f"{failed[0].name} failed:\n{failed[0].trace}")


def main(messages: int, store: int) -> None:
    """Run the job that stands on standard input: the entry point of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the one that watches ends us
    to_parent = connection.Connection(messages, readable=False)
    status = 1

    def tell(kind: str, content: Any) -> None:
        to_parent.send_bytes(pickle.dumps((kind, content)))  # `send` would share tensors, which ends with the process

    try:
        job: _Job = pickle.load(sys.stdin.buffer)
        _die_with(job.parent)
        set_threads(job.threads)

        def progress(done: int, total: int, what: str) -> None:
            tell("progress", (done, total, what))

        with join(job.rank, job.size, torch.device(job.device), f"/proc/self/fd/{store}") as place:
            result = job.work(device=job.device, progress=progress if place.first else None, **job.arguments)
        tell("done", result if place.first else None)
        status = 0
    except CrelleError as e:
        tell("error", e)
    except BaseException:
        tell("trace", traceback.format_exc())
    os._exit(status)  # at once: after a failure, libraries would wait here for ranks that are gone


def _die_with(parent: int) -> None:
    """Let Linux kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
