"""Plans as JSON files: `crelle search` writes them, `crelle quantize --plan` reads them."""

from pathlib import Path

from crelle.errors import FormatError, SchemeError
from crelle.formats.storage.io import read_json, shown, to_json, write_whole
from crelle.quantizers.base import BitConfig, GroupedConfig
from crelle.quantizers.scheme import parse
from crelle.quantizers.search.bit_allocation import Plan

PLAN_VERSION = 1


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan as JSON, for `crelle quantize --plan`."""
    value = {
        "plan_version": PLAN_VERSION,
        "recipe": str(plan.recipe),
        "scheme": plan.scheme,
        "bits_per_weight": plan.bits_per_weight,
        "predicted_loss": plan.loss,
        "notes": plan.notes,
        "overrides": plan.overrides,
    }
    write_whole(path, to_json(value))


def read_plan(path: Path) -> Plan:
    """Read a plan back; what is wrong with the file is a sentence."""
    value = read_json(path)
    if value.get("plan_version") != PLAN_VERSION:
        raise FormatError(f"{path} is not a plan of version {PLAN_VERSION}; create one with `crelle search`")
    try:
        recipe = config_of(value["recipe"])
        parsed = {str(module): config_of(scheme) for module, scheme in value["overrides"].items()}
        bits, loss, notes = float(value["bits_per_weight"]), float(value["predicted_loss"]), dict(value["notes"])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, SchemeError) as e:
        raise FormatError(
            f"{path} is not a complete plan ({shown(str(e), 300)}); create one with `crelle search`"
        ) from e
    if not parsed:
        raise FormatError(f"{path} names no matrix")
    for module, config in parsed.items():
        if config.at(BitConfig(recipe.bits, recipe.group)) != recipe:
            raise FormatError(f"{path}: the scheme of '{module}' is not '{recipe}' with other bits and group")
    return Plan({m: BitConfig(c.bits, c.group) for m, c in parsed.items()}, bits, loss, recipe, notes)


def config_of(scheme: str) -> GroupedConfig:
    """Parse a scheme that has bits and group to choose."""
    config = parse(scheme)
    if not (isinstance(config, GroupedConfig) and config.searchable):
        raise SchemeError(f"a plan sets bits and group, which scheme '{scheme}' does not have")
    return config
