"""Several ranks do what one does; if one dies, all end, and a resumed run ends in the same bytes.

Starting a process that loads torch takes seconds, so one world does all that need not be killed. Sums over two parts
differ from sums over one in their last digits: 1e-5 of their size bounds that. A code that was near a tie may then be
another one, error feedback carries that to other columns of its row, and every layer behind sees other inputs. So whole
models are compared by what counts, their divergence from the full-precision model: within a tenth, as it is when one
rank only takes batches of another size.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import sampled_cases
import torch
from conftest import Run, write_tiny_model
from rank_jobs import TEXT, everything, fails, tuned
from torch import Tensor

from crelle.errors import CrelleError, FormatError, ProcessError, SchemeError, UnsupportedError
from crelle.formats.storage.destination import PARTIAL
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import CalibrationModel
from crelle.quantize_job import rank_devices, rank_processes
from crelle.quantize_job.rank_devices import RankDevice, parse_devices
from crelle.quantize_job.rank_processes import run_ranks
from crelle.quantize_job.run import dry_run, quantize
from crelle.quantize_job.tune import tune_checkpoint
from crelle.quantizers.ranks import deal, world
from crelle.quantizers.stage_times import COMMUNICATION
from crelle.quantizers.training.blockwise import Training
from crelle.quantizers.training.end_to_end import Network

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # said once on CPUs without bf16 products
SCHEMES = {
    "gptq": "gptq:bits=3,group=24,guidance=0.5",
    **({"atom": "atom:w=4,a=4,kv=4,group=24,outliers=8,refine=0"} if sampled_cases.every_case else {}),
    "auto": "auto:bits=4.5,steps=4",
    "full": "mixed:four=0.25,tune=full,steps=4,end=20,own=4",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "hidden_size": 36, "intermediate_size": 50, "head_dim": 6}
    return write_tiny_model(tmp_path_factory.mktemp("models") / "m", **sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the fixtures below leave their checkpoints."""
    return tmp_path_factory.mktemp("worlds")


def ranks_do(model: Path, folder: Path, devices: tuple[RankDevice, ...], names: tuple[str, ...] = ()) -> dict[str, Any]:
    folder.mkdir()
    schemes = {n: s for n, s in SCHEMES.items() if not names or n in names}
    found: dict[str, Any] = run_ranks(everything, devices, {"source": model, "folder": folder, "schemes": schemes})
    return found


@pytest.fixture(scope="module")
def one(model: Path, folder: Path) -> dict[str, Any]:
    (folder / "one").mkdir()
    return everything("cpu", None, model, folder / "one", SCHEMES)


@pytest.fixture(scope="module")
def two(model: Path, folder: Path) -> dict[str, Any]:
    return ranks_do(model, folder / "two", (RankDevice(), RankDevice()))


def contents(directory: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in directory.iterdir()}


@torch.no_grad()
def divergence(path: Path, model: Path) -> float:
    """Return the mean KL divergence of a checkpoint from the model, on tokens that it has not seen."""
    rows = torch.randint(0, 256, (16, 32), generator=torch.Generator().manual_seed(1))
    networks = [Network.of(CalibrationModel(open_weights(p))) for p in (path, model)]
    mine, full = (n.model.logits(n.hidden(rows)).log_softmax(-1) for n in networks)
    return float(torch.nn.functional.kl_div(mine, full, log_target=True, reduction="sum") / rows.numel())


def close(a: Tensor, b: Tensor, rtol: float = 1e-5) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= rtol * float(b.abs().max())


def test_what_ranks_tell_each_other(two: dict[str, Any]) -> None:
    found = two["primitives"]
    a, b = (torch.randn(7, 3, generator=torch.Generator().manual_seed(r)) for r in range(2))
    assert found["sum"] == (a + b).tolist()
    assert found["transposed sum"] == (a + b).T.tolist()
    assert found["sums"] == [3.0] * 7
    small = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r, n in ((0, 4), (1, 5))]
    assert found["mean"] == pytest.approx(float(torch.cat(small).mean()))
    assert found["gather"] == torch.arange(22).view(11, 2).tolist()
    assert sorted(row[0] for row in found["taken"]) == [0, 6, 6, 14, 20]
    assert found["counts"] == [0, 1]
    assert found["value"] == ["a", 0]
    assert found["once"] == [0, 1]  # such work is of a world of one
    assert found["same on all ranks"] == [1, 1]


def test_steps_are_those_of_one_rank(one: dict[str, Any], two: dict[str, Any]) -> None:
    for name, mine in two["primitives"]["steps"].items():
        for a, b in zip(mine, one["primitives"]["steps"][name], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


def test_stats_and_block_losses_are_those_of_one_rank(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert two["layer"].keys() == one["layer"].keys()
    for name, found in two["layer"].items():
        rtol = 1e-3 if name == "losses" else 0.01 if name.startswith("guided") else 1e-5  # guidance: bf16 weights
        assert close(found, one["layer"][name], rtol), name


def test_end_to_end_losses_are_those_of_one_rank(
    model: Path, folder: Path, one: dict[str, Any], two: dict[str, Any], tmp_path: Path
) -> None:
    same_start = tuned("cpu", None, model, folder / "two" / "auto", tmp_path)
    for name, losses in two["tuned"].items():
        assert losses == pytest.approx(same_start[name], rel=1e-3)
        assert (folder / "two" / f"tuned {name}" / "config.json").exists()


def test_a_dry_run_measures_on_all(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert (one["dry"]["devices"], two["dry"]["devices"]) == (1, 2)
    assert two["dry"]["layers"] == 1
    assert COMMUNICATION in two["dry"]["stages"]
    assert COMMUNICATION not in one["dry"]["stages"]


@pytest.mark.parametrize("name", SCHEMES)
def test_models_are_as_good_as_one_ranks(
    name: str, model: Path, folder: Path, one: dict[str, Any], two: dict[str, Any]
) -> None:
    mine, theirs = (divergence(folder / ranks / name, model) for ranks in ("two", "one"))
    assert mine == pytest.approx(theirs, rel=0.1)
    shared, alone = two["losses"][str(folder / "two" / name)], one["losses"][str(folder / "one" / name)]
    assert len(shared) == len(alone)
    if alone:  # single steps differ more where training multiplies in bf16
        assert fmean(shared) == pytest.approx(fmean(alone), rel=0.05)


def test_a_training_that_was_stopped_goes_on_to_the_same_weights(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one["resumed"] == two["resumed"] == [True, True, True]


class Started:
    """The processes that were started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pids: list[int] = []
        start = rank_processes._Rank.__init__

        def started(rank: Any, *given: Any) -> None:
            start(rank, *given)
            self.pids.append(rank.process.pid)

        monkeypatch.setattr(rank_processes._Rank, "__init__", started)

    def gone(self) -> bool:
        """Tell whether none of them is there any more, and forget them."""
        until, left = time.monotonic() + 10, self.pids
        while (left := [pid for pid in left if runs(pid)]) and time.monotonic() < until:
            time.sleep(0.01)
        self.pids.clear()
        return not left


def runs(pid: int) -> bool:
    """Tell whether a process or a thread of it runs; one that has ended may wait for an init that never asks for it."""
    try:
        threads = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
        return any(") Z " not in stat.read_text() for stat in threads)
    except (FileNotFoundError, ProcessLookupError):
        return False


def in_a_fork(work: Callable[[], object]) -> int:
    """Run work in a copy of this process; return what it exited with, negative for the signal that killed it."""
    if (pid := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # its threads are not needed after the fork
@pytest.mark.parametrize(
    ("name", "victims"),  # in calibration and in training; None: the process that watches
    [
        pytest.param("gptq", (None,), id="parent"),
        pytest.param("gptq", (1,), id="rank 1", marks=pytest.mark.slow),
        pytest.param("full", (None, 1), id="parent, rank 1", marks=pytest.mark.slow),
        pytest.param("full", (0, None), id="rank 0, parent", marks=pytest.mark.slow),
    ],
)
def test_whoever_is_killed_all_end_and_a_resumed_run_has_the_same_bytes(
    name: str,
    victims: tuple[int | None, ...],
    model: Path,
    folder: Path,
    two: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, pids, out = Started(monkeypatch), tmp_path / "pids", tmp_path / "out"

    def run(resume: bool, progress: Any = None) -> None:
        options = {"text": TEXT, "devices": "cpu,cpu", "resume": resume, "progress": progress}
        quantize(model, out, SCHEMES[name], **options)

    for victim, moment in zip(victims, ("layers.0", "loss"), strict=False):

        def kill(done: int, total: int, note: str, victim: int | None = victim, moment: str = moment) -> None:
            if moment in note:
                pids.write_text(" ".join(map(str, started.pids)))
                os.kill(os.getpid() if victim is None else started.pids[victim], signal.SIGKILL)

        resume = moment == "loss"
        if victim is None:
            assert in_a_fork(lambda r=resume, p=kill: run(r, p)) == -signal.SIGKILL
        else:
            with pytest.raises(
                ProcessError, match=rf"rank {victim} \(cpu\) was killed .* run again with `resume=True`"
            ):
                run(resume, kill)
        started.pids[:] = [int(pid) for pid in pids.read_text().split()]
        assert len(started.pids) == 2
        assert started.gone()
        assert not out.exists()
        assert Path(f"{out}.base").exists() == (moment == "loss")
        with pytest.raises(FormatError, match=r"devices = 2, now it is 1|2 devices, but this run has 1"):
            quantize(model, out, SCHEMES[name], text=TEXT, device="cpu", resume=True)
    run(True)
    assert contents(out) == contents(folder / "two" / name)
    assert not Path(f"{out}{PARTIAL}").exists()


@pytest.mark.parametrize("how", ["sentence", pytest.param("bug", marks=pytest.mark.slow)])
def test_the_error_of_a_rank_ends_all(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    kind, words = (SchemeError, "^rank says no$") if how == "sentence" else (RuntimeError, "(?s)rank 1.*a bug")
    with pytest.raises(kind, match=words):
        run_ranks(fails, (RankDevice(), RankDevice()), {"how": how})
    assert started.gone()


def test_matrices_are_dealt_by_size() -> None:
    assert deal({"q": 4, "k": 1, "v": 1}, 2) == {"q": 0, "k": 1, "v": 1}
    assert deal({"gate": 5, "up": 5, "x": 5}, 2) == {"gate": 0, "up": 1, "x": 0}
    assert deal({"o": 1}, 3) == {"o": 0}
    assert deal({"q": 1, "k": 1}, 1) == {"q": 0, "k": 0}


def test_a_process_that_has_not_joined_is_alone() -> None:
    assert world().alone
    assert (world().rank, world().size) == (0, 1)
    x = torch.randn(3, 2)
    assert world().add(x) is x
    assert torch.equal(world().part(x), x)
    assert world().once(lambda: {1: x})[1] is x


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("", "must be GPU indices"),
        ("gpu", "got 'gpu'"),
        ("0,,1", "got '0,,1'"),
        ("-1", "must be GPU indices"),
        ("cpu,0", "not both GPUs and cpu"),
        (",".join(["cpu"] * 65), "at most 64"),
        ("0,1,2", "GPU 2 does not exist: torch sees GPUs 0 to 1"),
        ("cuda:5", "GPU 5 does not exist"),
        ("1,0,1", "GPU 1 occurs twice"),
    ],
)
def test_devices_that_cannot_be_are_refused(devices: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(CrelleError, match=words):
        parse_devices(devices)


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_devices("all") == parse_devices("0, cuda:1") == (RankDevice(0), RankDevice(1))
    assert parse_devices("cpu,cpu") == (RankDevice(), RankDevice())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert RankDevice(1).environment() == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert RankDevice(1).environment() == {"CUDA_VISIBLE_DEVICES": "7"}
    monkeypatch.setattr(rank_devices.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UnsupportedError, match="torch sees no CUDA device"):
        parse_devices("all")


def test_what_several_devices_have_nothing_to_do_for_is_refused(
    model: Path, folder: Path, one: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="`devices` does not apply"):
        quantize(model, tmp_path / "q", "rtn:bits=4,group=32", devices="cpu,cpu")
    with pytest.raises(UnsupportedError, match="at most 8 devices"):
        quantize(model, tmp_path / "q", SCHEMES["auto"], text=TEXT, devices=",".join(["cpu"] * 9))
    training = Training(steps=1, batch=2)
    with pytest.raises(SchemeError, match="are too few for 3 devices"):
        tune_checkpoint(folder / "one" / "gptq", None, tmp_path / "q", training, text=TEXT.text, devices="cpu,cpu,cpu")
    with pytest.raises(SchemeError, match="give only one"):
        dry_run(model, SCHEMES["gptq"], text=TEXT, device="cpu", devices="cpu,cpu")
    assert list(tmp_path.iterdir()) == []


def tensors(path: Path) -> dict[str, Any]:
    """All files, but of the index only where tensors are: its metadata says which effort chose the data."""
    found: dict[str, Any] = dict(contents(path))
    name = "crelle.safetensors.index.json"
    return found | {name: json.loads(found[name])["weight_map"]}


def test_one_device_is_the_way_without_ranks(
    model: Path, folder: Path, one: dict[str, Any], tmp_path: Path, crelle: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "subprocess", None)
    (tmp_path / "text").write_text(TEXT.text)
    given = [
        "--scheme",
        SCHEMES["gptq"],
        "--calib",
        tmp_path / "text",
        "--rows",
        TEXT.rows,
        "--length",
        TEXT.length,
        "--head",
        "none",
    ]
    done = crelle("quantize", model, tmp_path / "q", *given, "--devices", "cpu")
    assert done.returncode == 0, done.stderr
    assert tensors(tmp_path / "q") == tensors(folder / "one" / "gptq")
    refused = crelle("quantize", model, tmp_path / "r", *given, "--devices", "cpu,cpu", "--device", "cpu")
    assert refused.returncode == 2
    assert "exclude each other" in refused.stderr


@pytest.mark.gpu
def test_a_world_of_one_gpu_by_nccl(model: Path, folder: Path) -> None:
    names = ("gptq", "auto", "full")
    (folder / "here").mkdir()
    here = everything("cuda", None, model, folder / "here", {n: SCHEMES[n] for n in names})
    there = ranks_do(model, folder / "nccl", (RankDevice(0),), names)
    assert there["primitives"]["sum"] == here["primitives"]["sum"]
    assert there["primitives"]["same on all ranks"] == [1]
    assert there["resumed"] == [True, True, True]
    for name, found in there["layer"].items():
        assert close(found, here["layer"][name], 1e-2 if name == "losses" else 1e-5), name
    for name, losses in there["tuned"].items():
        assert losses == pytest.approx(here["tuned"][name], rel=0.1)
    quantize(model, folder / "chosen", SCHEMES["gptq"], text=TEXT, devices="0")  # one device: no ranks
    assert contents(folder / "chosen") == contents(folder / "here" / "gptq")
    for name in names:
        mine, theirs = (divergence(folder / where / name, model) for where in ("nccl", "here"))
        assert mine == pytest.approx(theirs, rel=0.1)
