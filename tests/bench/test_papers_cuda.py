"""bench/gpu/papers_cuda.py and bench/quality/bcq_quality.py: which rows they measure, and with which kernels."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT

from crelle.kernels.cuda.lut import lut
from crelle.kernels.cuda.mixed import mixed_config, mixed_decode, mixed_gemv
from crelle.kernels.cuda.planes import bmma_gemv

CPU = torch.device("cpu")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    for room in ("gpu", "quality"):
        monkeypatch.syspath_prepend(str(ROOT / "bench" / room))
    return importlib.import_module("papers_cuda"), importlib.import_module("bcq_quality")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module in (bmma_gemv, mixed_gemv, mixed_config, mixed_decode, lut):
        monkeypatch.setattr(module, "multiprocessors", lambda *_: 132)
    for module in (mixed_config, mixed_decode):
        monkeypatch.setattr(module, "room_of_device", lambda: 227 * 1024)
    monkeypatch.setattr(bmma_gemv, "_pipeline_room", lambda _: 195 * 1024)
    monkeypatch.setattr(lut, "_room", lambda _: 226 * 1024)


def test_every_row_is_measured_once(scripts: tuple[ModuleType, ModuleType]) -> None:
    papers, quality = scripts
    for area in papers.AREAS.values():
        keys = [json.dumps(case.key, sort_keys=True) for case in area()]
        assert keys
        assert len(keys) == len(set(keys))
    schemes = [case["scheme"] for case in quality.cases()]
    assert len(schemes) == len(set(schemes)) == 64


@pytest.mark.usefixtures("hopper")
def test_kernels_are_known_before(scripts: tuple[ModuleType, ModuleType]) -> None:
    papers, _ = scripts
    (product, *_), (flow, *_) = list(papers.products()), list(papers.dataflows())
    assert {file for file, _ in papers.kernels_of(product, "products", CPU)} == {
        "planes/bmma_gemv.cu",
        "planes/encode.cu",
    }
    found = {expression for file, expression in papers.kernels_of(flow, "dataflow", CPU) if "gemv" in file}
    arguments = [expression.partition("<")[2].split(", ") for expression in found]  # SUBS, M, TILES, WARPS, STAGES, …
    assert {(a[4] == "1", a[6]) for a in arguments} == {(True, "false"), (False, "false"), (False, "true")}
    variants = [case for case in papers.look_ups() if case.key["variant"] in papers.VARIANTS]
    tables = {expression for case in variants for _, expression in papers.kernels_of(case, "look-up", CPU)}
    assert all(any(f"crelle::{name}" in e for e in tables) for name in ("SHARED", "PRIVATE"))


def test_attention_and_feed_forward_get_their_own_bits(scripts: tuple[ModuleType, ModuleType], data: Path) -> None:
    _, quality = scripts
    (case,) = (c for c in quality.cases() if c["scheme"] == "hbcq:bits=5+2,group=128")
    scheme, others = quality.overrides(case, data / "stories15M")
    assert scheme == "hbcq:bits=2,group=128"
    assert set(others.values()) == {"hbcq:bits=5,group=128"}
    assert len(others) == 6 * 4
    assert all(".self_attn." in name for name in others)
