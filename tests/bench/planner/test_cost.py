"""The cost of a million tokens: the paper's own figures, the command line, and what is refused."""

import json
from pathlib import Path

import pytest
from conftest import Run

from crelle.bench.planner.cost import CostModel
from crelle.errors import SchemeError, UnsupportedError


@pytest.mark.parametrize(("price", "hourly"), [(12500, 0.285), (1499, 0.034), (699, 0.016)])
def test_buying_cost_per_hour_is_that_of_the_paper(price: int, hourly: float) -> None:
    """Section 6.1: A100, RTX 3090, RTX 2080 over 5 years."""
    tokens_per_second = 1e6 / 3600  # a million in an hour
    assert CostModel.parse(f"price={price},watt=0").per_million(tokens_per_second).total == pytest.approx(
        hourly, abs=6e-4
    )


def test_reductions_are_those_of_the_papers_table_3() -> None:
    """Llama-2-7B: PyTorch on an RTX 3090, 290 W, 25.9 tokens/s; theirs there and on an RTX 2080."""
    plain = CostModel.parse("price=1499,watt=290").per_million(25.9)
    ours = CostModel.parse("price=1499,watt=350").per_million(45.2)
    small = CostModel.parse("price=699,watt=150").per_million(34.0)
    assert plain.runtime / ours.runtime == pytest.approx(1.44, abs=0.01)
    assert plain.runtime / small.runtime == pytest.approx(2.53, abs=0.02)


def test_power_that_was_measured_stands_in_for_one_that_was_not_said() -> None:
    model = CostModel.parse("price=0, kwh=0.5")
    assert model.per_million(1e6 / 3600, measured_watt=2000).total == pytest.approx(1.0)
    assert CostModel.parse("price=0,kwh=0.5,watt=1000").per_million(1e6 / 3600, 2000).watt == 1000
    with pytest.raises(UnsupportedError, match="watt="):
        model.per_million(10)


@pytest.mark.parametrize(
    "text", ["", "price", "price=", "price=x", "price=-1", "price=nan", "price=inf", "watt=3", "price=1,price=2", "p=1"]
)
def test_a_cost_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(SchemeError, match="--cost"):
        CostModel.parse(text)


def test_costs_name_their_currency() -> None:
    assert CostModel.parse("price=1,watt=1").per_million(1).currency == "USD"
    assert CostModel.parse("price=1,watt=1,currency=EUR").per_million(1).currency == "EUR"
    for wrong in ("currency=", "currency=EUR,currency=CHF", "currency=a very long name"):
        with pytest.raises(SchemeError, match="--cost"):
            CostModel.parse(f"price=1,{wrong}")


def test_no_years() -> None:
    with pytest.raises(SchemeError, match="years=0"):
        CostModel.parse("price=1,years=0")


def test_command(crelle: Run, tiny_model: Path) -> None:
    """On the CPU the power must be said; a million tokens cost what the speed of the row says."""
    options = ("bench", "decode", tiny_model, "--tokens", 2, "--prompt", 4, "--rounds", 1, "--threads", 1)
    assert "watt=" in crelle(*options, "--cost", "price=100").stderr
    done = crelle(*options, "--cost", "price=876,watt=100,kwh=0.1,years=1", "--json")
    row = json.loads(done.stdout)
    hours = 1e6 / row["decode_tokens_per_second"] / 3600
    assert row["cost"]["total"] == pytest.approx(hours * (0.1 + 0.01))
    assert row["cost"]["currency"] == "USD"
    assert "USD per million tokens" in crelle(*options, "--cost", "price=876,watt=100").stdout
