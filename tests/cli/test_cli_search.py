"""crelle search: plan, page and picture; what cannot be is a sentence."""

import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import write_tiny_model
from in_process import Result, run, succeed

from crelle.eval.plan_eval import rank_correlation, smallest_meeting
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.quantizers.base import BitConfig
from crelle.quantizers.pipeline import measure
from crelle.quantizers.search.bit_allocation import Plan
from crelle.quantizers.search.plan_file import read_plan

SMALL = ("--rows", "2", "--length", "24", "--bits", "2,4", "--groups", "32,row", "--threads", "1")


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The folder that a search has made and filled, and what it printed."""
    folder = tmp_path_factory.mktemp("search") / "new" / "found"
    return folder, succeed("search", tiny_model, "--target-bits", "4.0", *SMALL, "--out", folder)


def test_target_bits_gives_plan_page_and_picture(found: tuple[Path, Result]) -> None:
    folder, done = found
    assert "chosen" in done.out
    assert "bits per weight" in done.out
    plan = read_plan(folder / "plan.json")
    assert len(plan.choices) == 21
    assert 3.0 < plan.bits_per_weight <= 4.0
    assert {s.bits for s in plan.choices.values()} <= {2, 4}
    assert (folder / "front.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "front.html").read_text().startswith("<!doctype html>")


def test_the_plan_makes_a_model_of_its_size(tiny_model: Path, tmp_path: Path, found: tuple[Path, Result]) -> None:
    folder, _ = found
    rows = ("--rows", "2", "--length", "24", "--calib", folder / "front.html")
    succeed("quantize", tiny_model, tmp_path / "model", "--plan", folder / "plan.json", *rows)
    size, count = measure(Checkpoint(tmp_path / "model"))
    assert 8 * size / count == pytest.approx(read_plan(folder / "plan.json").bits_per_weight)


def test_the_page_needs_nothing_from_outside(found: tuple[Path, Result]) -> None:
    page = (found[0] / "front.html").read_text()
    assert not re.search(r"https?:|//|@import|url\(|<script|<link|\bsrc=", page)
    assert "prefers-color-scheme:dark" in page
    assert page.count('class="cell"') == 21

    class Balanced(HTMLParser):
        open_tags: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "line", "rect", "circle", "polyline"):
                self.open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag not in ("line", "rect", "polyline"):
                closed = self.open_tags.pop() if tag != "circle" else "circle"
                assert closed == tag

    parser = Balanced()
    parser.feed(page)
    assert parser.open_tags == []


def test_json_is_one_object_with_the_front(tiny_model: Path) -> None:
    found = succeed("search", tiny_model, "--target-bits", "3.6", *SMALL, "--per", "kind", "--json").json
    assert found["bits_per_weight"] <= 3.6
    assert len(found["overrides"]) == 21
    kinds = {(m.rpartition(".")[2], s) for m, s in found["overrides"].items()}
    assert len(kinds) == 7
    losses = [p["predicted_loss"] for p in found["front"]]
    assert losses == sorted(losses, reverse=True)


def test_max_perplexity_takes_the_smallest_that_meets_it(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 36, "intermediate_size": 50, "head_dim": 6}
    model = write_tiny_model(tmp_path / "model", **sizes)  # every plan that is tried takes a quantizing
    text = ("--text", tmp_path / "text.txt", "--context", "32", "--windows", "2")
    (tmp_path / "text.txt").write_text("Some words, and some more of them. " * 20)
    found = succeed("search", model, "--max-perplexity", "100000", *SMALL, *text, "--json").json
    assert len(found["front"]) > 10
    assert found["bits_per_weight"] == found["front"][0]["bits_per_weight"]
    assert found["perplexity"] <= 100000
    none = run("search", model, "--max-perplexity", "2", *SMALL, *text)
    assert none.code == 2
    assert "no plan reaches a perplexity of 2" in none.err


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[object, ...]]:
    """A model that is quantized in no time, and a text to measure it on."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"num_hidden_layers": 2, "hidden_size": 36, "intermediate_size": 50, "head_dim": 6}
    (folder / "text.txt").write_text("Some words, and some more of them. " * 20)
    options = ("--text", folder / "text.txt", "--context", "32", "--windows", "2", "--target-bits", "4", *SMALL)
    return write_tiny_model(folder / "model", **sizes), options


@pytest.mark.parametrize("confirmed", [True, False])
def test_check_compares_the_front_with_measured_losses(
    small: tuple[Path, tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, confirmed: bool
) -> None:
    """Measured losses are made up: in the order of the predicted ones, or in another."""
    made = itertools.count(1)

    def perplexity(*_: object, **__: object) -> float:
        i = next(made)
        return 1e6 / i if confirmed else 1e6 * (1 + i % 2)

    monkeypatch.setattr("crelle.eval.plan_eval.plan_perplexity", perplexity)
    model, options = small
    done = run("search", model, *options, "--check", "4", "--out", tmp_path / "found", "--json")
    assert done.code == (0 if confirmed else 1)
    found = done.json
    points = found["check"]["points"]
    assert len(points) == 4
    assert found["check"]["agrees"] is confirmed
    assert (found["check"]["rank_correlation"] == pytest.approx(1)) is confirmed
    full = found["check"]["full_perplexity"]
    assert [p["measured_loss"] for p in points] == pytest.approx([math.log(p["perplexity"] / full) for p in points])
    assert [p["bits_per_weight"] for p in points] == sorted(p["bits_per_weight"] for p in points)
    assert points[0]["bits_per_weight"] == found["front"][0]["bits_per_weight"]
    assert points[-1]["bits_per_weight"] == found["front"][-1]["bits_per_weight"]
    assert (tmp_path / "found" / "front.html").read_text().count('class="measured"') == 4
    assert ("do not rank like" in done.err) is not confirmed


def test_check_measures_what_quantizing_gives(small: tuple[Path, tuple[object, ...]]) -> None:
    model, options = small
    done = run("search", model, *options, "--check", "2", "--memory", "1GB")
    assert "rank correlation" in done.out
    assert done.code in (0, 1)  # random weights: a prediction of them may fail
    assert "measured loss" in done.out


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 9], [0.1, 0.2, 7, 8]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 9], [8, 7, 0.2, 0.1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 1, 2], [5, 5, 6]) == pytest.approx(1)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0


def test_bisection_finds_the_smallest() -> None:
    plans = [Plan({"m": BitConfig(2, 32)}, float(bits), 1.0 / bits) for bits in range(1, 20)]
    for most in range(1, 20):
        found, tried = smallest_meeting(plans, most, lambda p: 20 - p.bits_per_weight)
        assert found is not None
        assert found.bits_per_weight == 20 - most
        assert len(tried) <= 6
    assert smallest_meeting(plans, 0.5, lambda p: 20 - p.bits_per_weight)[0] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "either --target-bits"),
        (("--target-bits", "3", "--max-perplexity", "9"), "either --target-bits"),
        (("--target-bits", "1"), "the smallest plan"),
        (("--target-bits", "nan"), "nan"),
        (("--target-bits", "3", "--bits", "two"), "two"),
        (("--target-bits", "3", "--bits", "9"), "9"),
        (("--target-bits", "3", "--groups", "0"), "group"),
        (("--target-bits", "3", "--per", "layer"), "layer"),
        (("--target-bits", "3", "--recipe", "fp16"), "bits and group"),
        (("--target-bits", "3", "--rows", "0"), "at least 1"),
        (("--target-bits", "3", "--check", "1"), "at least 2"),
        (("--target-bits", "3", "--memory", "much"), "much"),
        (("--target-bits", "3", "--memory", "10KB"), "--memory"),
        (("--target-bits", "3", "--calib", "nowhere.txt"), "nowhere.txt"),
        (("--target-bits", "3", "--device", "abacus"), "abacus"),
    ],
)
def test_bad_options_are_sentences(tiny_model: Path, options: tuple[str, ...], words: str) -> None:
    done = run("search", tiny_model, *SMALL, *options)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


def test_errors_are_json_too(tmp_path: Path) -> None:
    done = run("search", tmp_path / "absent", "--target-bits", "3", "--json")
    assert done.code == 2
    assert "absent" in json.loads(done.out)["error"]
