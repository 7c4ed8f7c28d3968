"""CI's pins and their hashes agree, and hashes are taken for the right files."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "release"))

import pins

A, B, C = "a" * 64, "b" * 64, "c" * 64


def test_every_pin_has_hashes_and_every_hash_a_pin() -> None:
    text = pins.HASHES.read_text()
    assert pins.faults(pins.PINS.read_text(), text) == []
    assert pins.written(pins.read(text)) == text
    assert "://" not in text  # names and hashes only: where to fetch from is pip's configuration


@pytest.mark.parametrize(
    ("constraints", "hashes", "fault"),
    [
        ("x==1\ny==2\n", f"x==1 --hash=sha256:{A}\n", "y==2 has no hash"),
        ("x==2\n", f"x==2 --hash=sha256:{A}\ny==2 --hash=sha256:{B}\n", "y==2 has hashes and is not pinned"),
        ("x==1\n", "x==1 --hash=sha256:abc\n", "x==1 has something that is no SHA-256"),
        ("x==1\n", "x==1\n", "x==1 has something that is no SHA-256"),
    ],
)
def test_disagreements_are_named(constraints: str, hashes: str, fault: str) -> None:
    (found,) = pins.faults(constraints, hashes)
    assert found.startswith(fault)


def test_hashes_are_read_as_they_are_written() -> None:
    hashes = {"x==1": [A, B], "y.z==2+cpu": [C]}
    assert pins.read(pins.written(hashes)) == hashes


@pytest.mark.parametrize(
    ("file", "taken"),
    [
        ("some_name-1.0-py3-none-any.whl", True),
        ("some_name-1.0-cp311-cp311-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", True),
        ("some_name-1.0-cp39-abi3-manylinux_2_28_x86_64.whl", True),
        ("some_name-1.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("some_name-1.0.1-py3-none-any.whl", False),
        ("some_name_more-1.0-py3-none-any.whl", False),
        ("some_name-1.0-cp311-cp311-win_amd64.whl", False),
        ("some_name-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("some_name-1.0-cp39-cp39-manylinux_2_28_x86_64.whl", False),
        ("some_name-1.0.tar.gz", False),  # there is a wheel
    ],
)
def test_files_of_the_version_for_ci_are_taken(file: str, taken: bool) -> None:
    page = f'<a href="https://host/x/some_name-1.0-cp312-cp312-linux_x86_64.whl#sha256={B}">'
    page += f'<a href="https://host/y/{file}#sha256={A}">'
    assert pins.chosen(page, "Some.Name", "1.0") == ([B, A] if taken else [B])


def test_archive_is_taken_where_there_is_no_wheel() -> None:
    page = f'<a href="x/some-name-1.0.tar.gz#sha256={A}"><a href="x/some-name-1.1.tar.gz#sha256={B}">'
    assert pins.chosen(page, "some-name", "1.0") == [A]
