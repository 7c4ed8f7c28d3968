"""Writes the software bill of materials of a release: `make sbom`, or `python release/sbom.py OUT`.

CycloneDX 1.6 as JSON, from pyproject.toml, constraints.txt and what is installed: each pin with its package URL, its
license as its metadata has it, and what it needs itself. `scope` says what a component is to a user of Crelle:
required (installed with it, or compiled into the wheel), optional (by an extra), excluded (only builds or tests it).
The same tree gives the same bytes: no time, and a serial number that is derived from the contents.
"""

import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterable
from importlib.metadata import PackageMetadata, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parent))

import pins

ROOT = Path(__file__).resolve().parents[1]
COMPILED_IN = "nanobind"  # a static library of the compiled core
DEVELOPMENT = {"dev", "docs"}  # extras that no user of Crelle needs


def sbom() -> dict[str, Any]:
    """Return the document."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {canonicalize_name(n): v for n, v in pins.pins(pins.PINS.read_text()).items()}
    needs = {name: _needs(_installed(name, version), versions) for name, version in versions.items()}
    direct = {*_names(project["dependencies"]), COMPILED_IN}
    extras = project["optional-dependencies"]
    by_extra = {n for extra in extras.keys() - DEVELOPMENT for n in _names(extras[extra])}
    if missing := sorted((direct | by_extra) - versions.keys()):
        sys.exit(f"constraints.txt has no pin for: {', '.join(missing)}")
    required, optional = _closure(direct, needs), _closure(by_extra, needs)
    components = []
    for name, version in versions.items():
        scope = "required" if name in required else "optional" if name in optional else "excluded"
        component = {"type": "library", "bom-ref": _purl(name, version), "name": name, "version": version}
        licenses = _licenses(_installed(name, version))
        components.append({**component, "scope": scope, "purl": _purl(name, version), **licenses})
    own = _own_version()
    ref = _purl("crelle", own)
    graph = [{"ref": ref, "dependsOn": sorted(_purl(n, versions[n]) for n in direct | by_extra)}]
    graph += [
        {"ref": _purl(n, versions[n]), "dependsOn": sorted(_purl(m, versions[m]) for m in needs[n])} for n in versions
    ]
    crelle = {"type": "library", "bom-ref": ref, "name": "crelle", "version": own, "purl": ref}
    body = {
        "metadata": {
            "component": {**crelle, "licenses": [{"expression": project["license"]}]},
            "properties": [{"name": "crelle:source", "value": "constraints.txt: what CI builds and tests with"}],
        },
        "components": components,
        "dependencies": graph,
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    kind = {"$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX"}
    return {**kind, "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1, **body}


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _own_version() -> str:
    found = re.search(r'__version__ = "(.+)"', (ROOT / "src" / "crelle" / "version.py").read_text())
    assert found
    return found[1]


def _names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(r).name) for r in requirements} - {"crelle"}


def _installed(name: str, version: str) -> PackageMetadata | None:
    """Return the metadata of a pin, if that version is installed here (torch's may have a local part)."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    return found.metadata if found.version.partition("+")[0] == version else None


def _needs(metadata: PackageMetadata | None, versions: dict[Any, str]) -> set[str]:
    """Return the pins that a package needs on this platform, without its extras."""
    needed = [Requirement(r) for r in (metadata.get_all("Requires-Dist") or [])] if metadata else []
    here = [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return {name for r in here if (name := canonicalize_name(r.name)) in versions}


def _closure(names: set[str], needs: dict[Any, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += needs[name]
    return found


def _licenses(metadata: PackageMetadata | None) -> dict[str, Any]:
    """Return the license as the package's metadata has it: an expression, or a name where it has only that."""
    if metadata is None:
        return {}
    if expression := metadata.get("License-Expression"):
        return {"licenses": [{"expression": expression}]}
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License :: ")]
    names = [c.rpartition(" :: ")[2] for c in classifiers] or [metadata.get("License") or ""]
    # Some packages have the whole text of their license there: its first line is its name.
    lines = [name.strip().splitlines()[0] for name in names if name.strip()]
    return {"licenses": [{"license": {"name": name}} for name in lines]} if lines else {}


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist" / "crelle.cdx.json")
    document = sbom()
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".tmp")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(out)
    print(f"{out}: {len(document['components'])} components")
