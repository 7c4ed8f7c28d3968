"""Energy by NVML, with a board that exists on paper: what is counted, and the sentence where nothing can be."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from crelle.bench import energy


class NVMLError(Exception):
    pass


class Board(ModuleType):
    """A pynvml whose counter goes up by 1500 mJ at every reading."""

    NVMLError = NVMLError

    def __init__(self, fails: str | None = None) -> None:
        super().__init__("pynvml")
        self.fails, self.reading, self.open = fails, 0, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fails == "init":
            raise NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        assert uuid == "GPU-1234-abcd"
        return "board"

    def nvmlDeviceGetTotalEnergyConsumption(self, board: str) -> int:  # noqa: N802
        assert board == "board"
        if self.fails == "counter":
            raise NVMLError("Not Supported")
        self.reading += 1500
        return self.reading


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch believe in a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _=None: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234-abcd"))


@pytest.mark.usefixtures("gpu")
def test_joules_are_the_difference_of_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    monkeypatch.setitem(sys.modules, "pynvml", board)
    with energy.measure() as spent:
        assert board.open == 1
    assert spent.joules == 1.5
    assert spent.seconds > 0
    assert spent.reason is None
    assert board.open == 0


@pytest.mark.usefixtures("gpu")
def test_energy_per_call_is_shared_out_among_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Board())
    calls: list[int] = []
    spent = energy.per_call(lambda: calls.append(1), seconds=0.0)  # one call to warm up, one that counts
    assert len(calls) == 2
    assert spent.joules == 1.5


@pytest.mark.usefixtures("gpu")
def test_nvml_is_closed_where_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    monkeypatch.setitem(sys.modules, "pynvml", board)
    with pytest.raises(ZeroDivisionError), energy.measure():
        raise ZeroDivisionError
    assert board.open == 0


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("fails", "words"), [("init", "Driver Not Loaded"), ("counter", "Not Supported")])
def test_a_board_without_a_counter_is_a_sentence(monkeypatch: pytest.MonkeyPatch, fails: str, words: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Board(fails))
    with energy.measure() as spent:
        pass
    assert spent.joules is None
    assert words in str(spent.reason)


@pytest.mark.usefixtures("gpu")
def test_absent_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with energy.measure() as spent:
        pass
    assert spent.joules is None
    assert "crelle[energy]" in str(spent.reason)


def test_without_a_gpu_there_is_a_reason_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spent = energy.per_call(lambda: None)
    assert spent.joules is None
    assert "GPU" in str(spent.reason)
