"""The commands refuse, before any work, an OUT whose writing would lose something of the user's."""

import os
import shutil
from pathlib import Path

import pytest
from in_process import run, succeed
from tiny_gguf import write_tiny_gguf

from crelle.eval import smollm2
from crelle.quantizers.pipeline import quantize

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # said once on CPUs without bf16 products
SCHEME = ("--scheme", "rtn:bits=4,group=32")
SMALL = ("--target-bits", "4.0", "--rows", "2", "--length", "24", "--bits", "2,4", "--groups", "32", "--threads", "1")
TRAINING = ("--steps", "1", "--batch", "1", "--length", "16", "--device", "cpu")


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "m")


@pytest.fixture(scope="module")
def good(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(tiny_model, tmp_path_factory.mktemp("good") / "q", SCHEME[1]).out


@pytest.fixture
def made(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "q")


def tree(top: Path) -> dict[str, bytes]:
    return {str(Path(r, f).relative_to(top)): Path(r, f).read_bytes() for r, _, files in os.walk(top) for f in files}


def refused(top: Path, *command: object, words: tuple[str, ...] = ("Choose another OUT",)) -> None:
    before = tree(top)
    done = run(*command)
    assert done.code == 2, done.err
    assert tree(top) == before
    for word in words:
        assert word in done.err
    assert len([line for line in done.err.splitlines() if line.strip()]) == 1


def test_quantize(model: Path, tmp_path: Path) -> None:
    for out in (model, model / "q", tmp_path, model / ".." / "m"):
        refused(tmp_path, "quantize", model, out, *SCHEME, "--overwrite")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("mine")
    words = ("is not a Crelle checkpoint", "--overwrite deletes only what Crelle wrote")
    refused(tmp_path, "quantize", model, tmp_path / "thesis", *SCHEME, "--overwrite", words=words)


def test_quantize_a_file(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    file = write_tiny_gguf(tmp_path / "d" / "m.gguf")
    for out in (file, tmp_path / "d", tmp_path):
        refused(tmp_path, "quantize", file, out, *SCHEME, "--overwrite")
    succeed("quantize", file, tmp_path / "d" / "q", *SCHEME)  # beside it is fine
    assert file.exists()


def test_quantize_with_its_text_or_plan_in_out(model: Path, made: Path, tmp_path: Path) -> None:
    for option in ("--calib", "--plan"):
        (made / "text.txt").write_text("mine " * 100)
        refused(tmp_path, "quantize", model, made, *SCHEME, option, made / "text.txt", "--overwrite")


def test_quantize_beside_a_users_old_and_partial(model: Path, made: Path, tmp_path: Path) -> None:
    (tmp_path / "q.old").mkdir()
    (tmp_path / "q.old" / "thesis.txt").write_text("mine")
    succeed("quantize", model, made, "--scheme", "fp16", "--overwrite")
    assert (tmp_path / "q.old" / "thesis.txt").read_text() == "mine"
    (tmp_path / "q.old").rename(tmp_path / "home")
    (tmp_path / "q.partial").symlink_to("home")
    for more in ((), ("--resume",), ("--overwrite",)):
        refused(tmp_path, "quantize", model, made, *SCHEME, *more, words=())
    refused(tmp_path, "quantize", model, made, *SCHEME, "--overwrite", words=("q.partial is a link",))


def test_tune(model: Path, made: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a small text " * 100)
    for out in (made, made / "t", tmp_path, model, model / "t"):
        refused(tmp_path, "tune", made, out, "--teacher", model, "--text", text, *TRAINING, "--overwrite")
    other = shutil.copytree(made, tmp_path / "other")
    shutil.copyfile(text, other / "text.txt")
    refused(tmp_path, "tune", made, other, "--text", other / "text.txt", *TRAINING, "--overwrite")
    (other / "text.txt").rename(other / "thesis.txt")
    words = ("the file 'thesis.txt'",)
    refused(tmp_path, "tune", made, other, "--text", text, *TRAINING, "--overwrite", words=words)
    (other / "thesis.txt").unlink()
    for _ in range(2):  # what tune itself writes into OUT does not stand in its way
        succeed("tune", made, other, "--text", text, *TRAINING, "--overwrite")
    assert (other / "training.png").exists()


def test_export(made: Path, tmp_path: Path) -> None:
    for out in (made, made / "g", tmp_path):
        refused(tmp_path, "export", made, out, "--overwrite")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("mine")
    refused(tmp_path, "export", made, tmp_path / "thesis", "--overwrite", words=("is not a Crelle checkpoint",))


def test_search(model: Path, tmp_path: Path) -> None:
    for out in (model, model / "found", tmp_path):
        refused(tmp_path, "search", model, *SMALL, "--out", out)
    found = tmp_path / "found"
    found.mkdir()
    for name in ("plan.json", "front.html", "front.png"):
        (found / name).write_text("mine")
        refused(tmp_path, "search", model, *SMALL, "--out", found, words=(name, "choose another --out"))
        (found / name).unlink()
    (found / "thesis.txt").write_text("mine " * 400)
    for _ in range(2):  # its own results are replaced, other files are not touched
        succeed("search", model, *SMALL, "--out", found, "--calib", found / "thesis.txt")
    assert (found / "thesis.txt").read_text() == "mine " * 400
    refused(tmp_path, "search", model, *SMALL, "--out", found, "--calib", found / "front.html")


def test_search_does_not_draw_through_a_link(model: Path, tmp_path: Path) -> None:
    found = tmp_path / "found"
    succeed("search", model, *SMALL, "--out", found)
    (tmp_path / "mine.png").write_text("mine")
    (found / "front.png").unlink()
    (found / "front.png").symlink_to("../mine.png")
    succeed("search", model, *SMALL, "--out", found)
    assert (tmp_path / "mine.png").read_text() == "mine"
    assert (found / "front.png").read_bytes().startswith(b"\x89PNG")


def test_demo(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "smollm2", lambda: model)
    for name in ("fp16/thesis.txt", "fp16/config.json", "demo.json", "perplexity.png"):
        file = tmp_path / "out" / name
        file.parent.mkdir(parents=True)
        file.write_text("mine")
        refused(tmp_path, "demo", "--out", tmp_path / "out", "--device", "cpu", words=(str(tmp_path / "out"),))
        shutil.rmtree(tmp_path / "out")
