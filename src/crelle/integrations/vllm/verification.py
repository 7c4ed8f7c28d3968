"""The bytes of a checkpoint against the SHA-256 of each shard in its config, before vLLM reads them.

vLLM reads the shards itself, each rank on its own and only in parts, and knows no checksums. So the whole files are
checked once, where vLLM makes its config: before any other process is started. This reads every byte once more, from
the disk; the ranks then find them in the page cache.
"""

from pathlib import Path

from crelle.formats.storage.checkpoint import Checkpoint

_verified: set[tuple[object, ...]] = set()


def verify_once(directory: Path) -> None:
    """Open a checkpoint and check every byte; not again in this process where no file has changed since."""
    checkpoint = Checkpoint(directory, verify=False)
    key = directory.resolve(), *(_facts(directory / name, facts) for name, facts in _shards(checkpoint))
    if key not in _verified:
        checkpoint.verify()
        _verified.add(key)


def _shards(checkpoint: Checkpoint) -> list[tuple[str, dict[str, object]]]:
    return list(checkpoint.quantization["shards"].items())


def _facts(path: Path, facts: dict[str, object]) -> tuple[object, ...]:
    found = path.stat()
    return path.name, facts["sha256"], found.st_size, found.st_mtime_ns, found.st_ino
