"""What travels to a machine without a network: complete, pinned, and without what nothing imports."""

import re
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(ROOT / "release"))

import gpu_packages

THERE = {"numpy", "pyyaml", "requests", "tqdm"}  # with torch and transformers
LINUX = {"python_version": "3.12", "sys_platform": "linux", "platform_system": "Linux", "extra": ""}


def needed(name: str, found: set[str]) -> set[str]:
    """Return a package and what it needs on such a machine, found or not."""
    if name not in found | THERE:
        found.add(name)
        for line in requires(name) or []:
            one = Requirement(line)
            if one.marker is None or one.marker.evaluate(LINUX):
                needed(canonicalize_name(one.name), found)
    return found


@pytest.mark.parametrize("name", ["openai", "msgspec", "prometheus-client", "gguf"])
def test_what_a_package_needs_travels_with_it(name: str) -> None:
    try:
        wanted = needed(name, set())
    except PackageNotFoundError as e:
        pytest.skip(f"{e} is not installed here")
    assert wanted <= {canonicalize_name(n) for n in gpu_packages.NAMES}


def test_every_package_is_pinned_with_hashes() -> None:
    lines = gpu_packages.requirements(gpu_packages.NAMES).splitlines()
    assert len(lines) == len(gpu_packages.NAMES)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    with pytest.raises(SystemExit, match=r"constraints\.txt has no version of no-such"):
        gpu_packages.requirements(["no-such"])


def test_wheels_are_unpacked_without_what_nothing_imports(tmp_path: Path) -> None:
    names = ["a/__init__.py", "a/core.so", "a/tests/test_a.py", "a/core.pyi", "a-1.dist-info/METADATA", "a-1.data/x"]
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, "x")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "old.py").write_text("x")
    gpu_packages.unpack([tmp_path / "a.whl"], tmp_path / "to")
    left = {str(f.relative_to(tmp_path / "to")) for f in (tmp_path / "to").rglob("*") if f.is_file()}
    assert left == {"a/__init__.py", "a/core.so", "a-1.dist-info/METADATA"}
    assert gpu_packages.size(tmp_path / "to") == 3
