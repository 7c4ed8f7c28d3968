"""The bill of materials is well-formed CycloneDX, whole, and the same every time."""

import re
import sys
import uuid

from conftest import ROOT

sys.path.insert(0, str(ROOT / "release"))

import pins
import sbom

from crelle.version import __version__


def test_sbom_is_whole_and_well_formed() -> None:
    document = sbom.sbom()
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.6", 1)
    assert uuid.UUID(document["serialNumber"].removeprefix("urn:uuid:"))
    own = document["metadata"]["component"]
    assert (own["name"], own["version"]) == ("crelle", __version__)
    components = {c["bom-ref"]: c for c in document["components"]}
    assert len(components) == len(document["components"]) == len(pins.pins(pins.PINS.read_text()))
    for ref, c in components.items():
        assert ref == c["purl"] == f"pkg:pypi/{c['name']}@{c['version']}"
        assert re.fullmatch(r"[a-z0-9-]+", c["name"])
        assert c["scope"] in ("required", "optional", "excluded")
        for each in c.get("licenses", []):
            assert "expression" in each or each["license"]["name"]
    refs = [d["ref"] for d in document["dependencies"]]
    assert sorted(refs) == sorted([*components, own["bom-ref"]])
    assert all(to in components for d in document["dependencies"] for to in d["dependsOn"])


def test_scope_tells_what_a_user_gets() -> None:
    scopes = {c["name"]: c["scope"] for c in sbom.sbom()["components"]}
    assert scopes["torch"] == scopes["nanobind"] == "required"
    assert scopes["markupsafe"] == "required"  # jinja2 needs it
    assert scopes["aiohttp"] == scopes["matplotlib"] == scopes["cuda-core"] == "optional"
    assert scopes["pytest"] == scopes["zensical"] == scopes["cmake"] == "excluded"


def test_same_tree_gives_the_same_document() -> None:
    assert sbom.sbom() == sbom.sbom()
