"""End-loss guidance: the tokens' weights are what autograd says, however the work is split, and runs can be resumed."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import write_tiny_model, write_tokenizer
from mixtral import MIXTRAL, write_mixtral
from random_models import write_random
from torch import Tensor

from crelle.errors import CapacityError, FormatError, SchemeError, UnsupportedError
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import CalibrationModel
from crelle.models.families import families
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import dry_run, quantize
from crelle.quantizers import pipeline
from crelle.quantizers.calibration.calibrate import Calibrator
from crelle.quantizers.calibration.guidance import Guidance, GuidanceMemory, guide, plan_guidance
from crelle.quantizers.calibration.layer_api import TrainableLinear
from crelle.quantizers.calibration.loss_passes import sample_tokens
from crelle.quantizers.scheme import parse
from crelle.quantizers.stage_times import GUIDANCE, GUIDANCE_HEAD

LLAMA3_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
TEXT = CalibrationData(text="The quick brown fox jumps over the lazy dog. " * 60, rows=4, length=32)
SCHEME = "gptq:bits=2,group=24,guidance=0.5"


def rows(count: int = 5, length: int = 17) -> Tensor:
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(0))


def guided(model: CalibrationModel, part: int = 5, batch: int = 2) -> Guidance:
    return guide(model, rows(), GuidanceMemory(part, batch), seed=5, half=False)


def test_weights_are_the_squares_of_autograds_gradients(tiny_model: Path) -> None:
    """Against plain autograd through the whole model at once, with the same tokens sampled."""
    model, outputs = CalibrationModel(open_weights(tiny_model)), dict[str, Tensor]()

    def keep(linear: TrainableLinear, given: tuple[Tensor], out: Tensor) -> None:
        outputs[linear.name] = out

    x = model.embed(rows()).requires_grad_()
    blocks = [model.block(i) for i in range(model.layers)]
    for block in blocks:
        for linear in block.linears().values():
            linear.register_forward_hook(keep)
        x = block(x)
    logits = model.logits(model.finish(x)).flatten(0, 1)
    at = torch.rand(len(logits), 1, generator=torch.Generator().manual_seed(5))
    sampled = sample_tokens(logits.detach().softmax(-1), at)
    gradients = torch.autograd.grad(F.cross_entropy(logits, sampled, reduction="sum"), list(outputs.values()))
    squares = {n: g.square().mean(-1) for n, g in zip(outputs, gradients, strict=True)}
    found = guided(CalibrationModel(open_weights(tiny_model)))
    stages = [stage for block in blocks for stage in block.stages()]
    assert set(found.stages) == {stage[0] for stage in stages}
    for stage in stages:
        wanted = torch.stack([squares[n] / squares[n].mean() for n in stage]).mean(0)
        torch.testing.assert_close(found.weights(stage[0], 1.0), wanted, rtol=0.02, atol=1e-4)
        half = wanted.sqrt() / wanted.sqrt().mean()
        torch.testing.assert_close(found.weights(stage[0], 0.5), half, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize(("part", "batch"), [(1, 1), (2, 2), (4, 2), (3, 3)])
def test_parts_and_batches_change_nothing(tiny_model: Path, part: int, batch: int) -> None:
    model = CalibrationModel(open_weights(tiny_model))
    whole, split = guided(model), guided(model, part, batch)
    assert whole.stages.keys() == split.stages.keys()
    for stage, s in whole.stages.items():
        torch.testing.assert_close(s, split.stages[stage], rtol=0.01, atol=1e-6)


def test_the_hessian_is_weighted_by_them(tiny_model: Path) -> None:
    model = CalibrationModel(open_weights(tiny_model))
    guidance = guided(model)
    calibrator = Calibrator(model, rows(), batch=2, half=False)
    calibrator.guidance = guidance
    layer = calibrator.begin()
    name = layer.block.stages()[0][0]
    plain = layer.stats(name)
    calibrator.strength = lambda name: 0.5
    seen: list[Tensor] = []
    layer.full.linears()[name].watch = seen.append
    layer.full(model.embed(rows()))
    x, weight = seen[0].flatten(0, 1), guidance.weights(name, 0.5).flatten()
    found = layer.stats(name).hessian
    torch.testing.assert_close(found, (x * weight[:, None]).T @ x / len(x), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found, plain.hessian, rtol=0.1)


def test_linears_of_a_stage_share_the_greatest_strength(tiny_model: Path) -> None:
    model = CalibrationModel(open_weights(tiny_model))
    calibrator = Calibrator(model, rows(), half=False)
    calibrator.guidance = guided(model)
    layer = calibrator.begin()
    q, k, _ = layer.block.stages()[0]
    calibrator.strength = lambda name: 1.0
    wanted = layer.stats(q).hessian
    calibrator.strength = lambda name: float(name == k)
    assert torch.equal(layer.stats(q).hessian, wanted)


def test_experts_share_weights_of_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families(), "mixtral", MIXTRAL)
    model = CalibrationModel(open_weights(write_mixtral(tmp_path / "moe", num_hidden_layers=1)))
    found = guided(model)
    experts = [stage for stage in model.block(0).stages() if ".experts." in stage[0]]
    assert len(experts) > 2
    inner, outer = (s for name, s in found.stages.items() if ".experts." in name)
    for stage, s in zip(experts, [inner, outer] * (len(experts) // 2), strict=True):
        torch.testing.assert_close(found.weights(stage[0], 1.0), s.float(), rtol=0.02, atol=0.02)
    for s in (inner, outer):
        assert s.float().mean() == pytest.approx(1, rel=0.02)
        assert s.min() > 0


@pytest.mark.parametrize("scheme", ["gptq:bits=3", "awq:bits=4", "hbcq:bits=2", "mixed:", "atom:", "auto:bits=3"])
def test_guidance_is_a_setting(scheme: str) -> None:
    with_it = f"{scheme},guidance=0.5".replace(":,", ":")
    config = parse(with_it)
    assert config.guidance == 0.5  # type: ignore[attr-defined]
    assert parse(str(config)) == config
    for bad in ("2", "-0.1"):
        with pytest.raises(SchemeError, match="guidance must be 0 to 1"):
            parse(f"{scheme},guidance={bad}".replace(":,", ":"))


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    source = write_random(tmp_path / "bert", "Bert")
    write_tokenizer(source)
    with pytest.raises(UnsupportedError, match="guidance"):
        quantize(source, tmp_path / "q", SCHEME, text=TEXT, device="cpu")


# Runs that are resumed


def files(directory: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in directory.iterdir()}


@pytest.mark.parametrize("moment", ["model.embed_tokens", "model.layers.0", "guidance"])
def test_a_resumed_run_takes_the_weights_that_were_kept(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    quantize(small_model, tmp_path / "whole", SCHEME, text=TEXT, device="cpu")

    def dying(done: int, total: int, note: str) -> None:
        if note == moment:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(small_model, tmp_path / "again", SCHEME, text=TEXT, device="cpu", progress=dying)
    kept = tmp_path / "again.partial" / "guidance.state"
    assert kept.exists() == (moment != "guidance")
    if kept.exists():
        monkeypatch.setattr(pipeline, "guide", None)  # not computed again
    quantize(small_model, tmp_path / "again", SCHEME, text=TEXT, device="cpu", resume=True)
    assert files(tmp_path / "whole") == files(tmp_path / "again")
    assert not (tmp_path / "again" / kept.name).exists()


STARTER = """
import os, sys
import crelle.quantize_job.run
from crelle.cli.main import main
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            main()
        finally:
            os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""  # starts the command line once for every line that it reads, in a process that need not load torch again


@pytest.mark.slow  # in this process: above
def test_a_guided_run_that_is_killed_ends_in_the_same_bytes(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 48, "intermediate_size": 64, "head_dim": 8}
    source, out, text = write_tiny_model(tmp_path / "m", **sizes), tmp_path / "out", tmp_path / "text"
    text.write_text(TEXT.text)
    options = ("--scheme", SCHEME, "--calib", text, "--rows", "4", "--length", "32", "--threads", "1", "--resume")
    command = [sys.executable, "-c", STARTER, "quantize", source, out, "--head", "none", *map(str, options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None

        def start() -> int:
            starter.stdin.write("\n")  # type: ignore[union-attr]
            starter.stdin.flush()  # type: ignore[union-attr]
            return int(starter.stdout.readline())  # type: ignore[union-attr]

        for pattern, count in (("guidance.state", 1), ("*.safetensors", 5)):
            run = start()
            while len(list(tmp_path.glob(f"out.partial/{pattern}"))) < count:
                os.kill(run, 0)  # raises if the run ended before it could be killed
                time.sleep(0.002)
            os.kill(run, signal.SIGKILL)
            assert starter.stdout.readline() == f"{-signal.SIGKILL}\n"
            assert not out.exists()
        for name in ("resumed", "undisturbed"):
            start()
            assert starter.stdout.readline() == "0\n"
            out.rename(tmp_path / name)
        starter.stdin.close()
    assert files(tmp_path / "resumed") == files(tmp_path / "undisturbed")


def test_what_is_kept_of_another_run_is_refused(small_model: Path, tmp_path: Path) -> None:
    def dying(done: int, total: int, note: str) -> None:
        if note == "model.layers.0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(small_model, tmp_path / "q", SCHEME, text=TEXT, device="cpu", progress=dying)
    kept = tmp_path / "q.partial" / "guidance.state"
    guidance = Guidance({"model.layers.0.self_attn.q_proj": torch.ones(3, 32)})
    for broken in (b"", b"no tensors", None):
        kept.write_bytes(broken or b"")
        if broken is None:
            guidance.save(kept)
        with pytest.raises(FormatError, match=r"guidance\.state"):
            quantize(small_model, tmp_path / "q", SCHEME, text=TEXT, device="cpu", resume=True)
    quantize(small_model, tmp_path / "q", SCHEME, text=TEXT, device="cpu", overwrite=True)


# Memory and time


@pytest.mark.parametrize("gigabytes", [8, 16, 40, 80])
def test_the_plan_stays_within_its_budget(gigabytes: int) -> None:
    memory = plan_guidance(LLAMA3_8B, 128, 2048, 4096, 32, budget=gigabytes * 10**9, half=True)
    assert 1 <= memory.batch <= memory.part <= 128
    assert memory.device_bytes <= gigabytes * 10**9
    more = plan_guidance(LLAMA3_8B, 128, 2048, 4096, 32, budget=2 * gigabytes * 10**9, half=True)
    assert memory.part <= more.part


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"guidance needs about .* GB, but calibration leaves 2 GB"):
        plan_guidance(LLAMA3_8B, 128, 2048, 4096, 32, budget=2 * 10**9, half=True)


def test_a_dry_run_measures_it(small_model: Path) -> None:
    cost = dry_run(small_model, SCHEME, text=replace(TEXT, rows=2), device="cpu")
    assert {GUIDANCE, GUIDANCE_HEAD} <= cost.once_seconds.keys()
    assert any("guidance" in sentence for sentence in cost.left_out)
