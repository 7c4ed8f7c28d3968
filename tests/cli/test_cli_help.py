"""Every command teaches itself: --help names all options, and each option says what it does."""

from collections.abc import Iterator

import pytest
import typer
from in_process import run, succeed

from crelle.cli.main import app

CONTRACT = {
    "quantize": "SRC OUT --scheme --calib --override --resume --overwrite --device --threads --json",
    "search": "--target-bits --max-perplexity --calib --out --device --json",
    "inspect": "--json",
    "eval": "--text --context --tokens --tasks --data --limit --results --against --device --threads --kernel --json",
    "generate": "--prompt --max-tokens --temperature --top-k --top-p --min-p --repetition-penalty --seed --stop "
    "--device --threads --kernel --json",
    "chat": "--system --max-tokens --temperature --top-k --top-p --min-p --repetition-penalty --seed --stop "
    "--device --threads --kernel --json",
    "serve": "--host --port --kv --memory --max-batch --queue-limit --timeout --api-key --api-key-file --device "
    "--threads --json",
    "warmup": "--batch --prompt --device --threads --kernel --json",
    "plan": "MODEL --gpus --memory --scheme --kv --context --batch --price --watt --plot --json",
    "explain": "--device --json",
    "doctor": "--json",
    "report": "RESULTS --out --png --cost --title --json",
    "demo": "--out --text --tokens --context --device --threads --json",
}


def commands() -> Iterator[tuple[str, typer.core.TyperCommand]]:
    """All commands with the words that call them, those of groups too."""
    waiting = [("", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop()
        if inner := getattr(command, "commands", None):
            waiting += [(f"{name} {n}".strip(), c) for n, c in inner.items()]
        else:
            yield name, command


ALL = dict(commands())


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("command", CONTRACT)
def test_command_of_the_contract_has_its_options(command: str) -> None:
    shown = succeed(command, "--help").out
    for option in CONTRACT[command].split():
        assert option in shown


@pytest.mark.parametrize("command", ALL)
def test_help_explains_the_command_and_every_option(command: str) -> None:
    shown = succeed(*command.split(), "--help").out
    assert len(ALL[command].help or "") > 40
    for parameter in ALL[command].params:
        if parameter.name == "help":
            continue
        assert parameter.help, f"{parameter.name} says nothing about itself"
        assert parameter.help.split()[0] in shown


@pytest.mark.parametrize("command", ALL)
def test_every_command_can_print_json(command: str) -> None:
    assert "--json" in [o for p in ALL[command].params for o in p.opts]


def test_help_lists_the_commands() -> None:
    shown = succeed("--help").out
    for command in CONTRACT:
        assert f" {command} " in shown


def test_nothing_at_all_shows_the_help() -> None:
    assert "crelle demo" in run().out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["quantise"], "quantise"),
        (["inspect"], "MODEL"),
        (["inspect", "x", "--jsno"], "--jsno"),
        (["generate", "x"], "--prompt"),
    ],
)
def test_mistyped_command_line_names_the_mistake(args: list[str], named: str) -> None:
    result = run(*args)
    assert result.code == 2
    assert named in result.err
    assert "Traceback" not in result.err
