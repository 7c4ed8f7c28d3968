"""crelle chat: a script's lines, and a person at a terminal."""

import json
import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import Result, run, succeed

from crelle import LLM, Sampling
from crelle.cli.commands import chat
from crelle.engine.generation_config import recommended_sampling
from crelle.engine.requests.output import StreamChunk
from crelle.errors import FormatError

_PLAIN = re.compile(rb"\r|\x1b\[[0-9;?]*[A-Za-z]")  # carriage returns, colours, bracketed paste
GREEDY = ("--temperature", 0)


# A script ----------------------------------------------------------------------------------------------------------


def test_lines_are_messages_up_to_an_empty_one(tiny_model: Path) -> None:
    args = ("chat", tiny_model, *GREEDY, "--system", "Be", "--max-tokens", 4, "--json")
    seen = succeed(*args, stdin="Hi\nYo\n\nnot read\n").json
    talk = seen["messages"]
    assert [m["role"] for m in talk] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in talk if m["role"] != "assistant"] == ["Be", "Hi", "Yo"]
    llm = LLM.load(tiny_model)
    for at in (2, 4):
        ids = llm.tokenizer.encode_chat(talk[:at])
        assert talk[at]["content"] == llm.generate(ids, Sampling(max_tokens=4)).text


def test_standard_output_has_the_answers_alone(tiny_model: Path) -> None:
    llm = LLM.load(tiny_model)
    expected = llm.generate(llm.tokenizer.encode_chat([{"role": "user", "content": "Hi"}]), Sampling(max_tokens=4)).text
    done = succeed("chat", tiny_model, *GREEDY, "--max-tokens", 4, stdin="Hi\n")
    assert (done.out, done.err) == (f"{expected}\n", "")


def test_lines_of_a_script_that_begin_with_a_slash_are_messages(tiny_model: Path) -> None:
    seen = succeed("chat", tiny_model, "--max-tokens", 2, "--json", stdin="/quit\n").json
    assert seen["messages"][0] == {"role": "user", "content": "/quit"}


def test_oldest_turns_make_room_when_the_context_is_full(tiny_model: Path) -> None:
    lines = [f"message {i} of a long talk" for i in range(5)]  # some 30 tokens each, in a context of 96
    done = succeed("chat", tiny_model, "--max-tokens", 20, "--json", stdin="\n".join(lines))
    assert [m["content"] for m in done.json["messages"] if m["role"] == "user"] == lines  # all are reported
    assert 2 <= done.json["dropped_messages"] <= 8
    assert "The context is full: the oldest 2 messages were dropped." in done.err


def test_message_longer_than_the_context_ends_a_script_in_a_sentence(tiny_model: Path) -> None:
    done = run("chat", tiny_model, stdin="Hi\n" + "x" * 200 + "\n")
    assert done.code == 2
    assert "tokens, but the model's context is 96" in done.err


def test_model_without_a_template_is_referred_to_generate(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    (model / "tokenizer_config.json").write_text("{}")
    done = run("chat", model)  # before anything is asked
    assert done.code == 2
    assert f"has no chat template; use `crelle generate {model} --prompt" in done.err


def test_template_that_refuses_a_system_message_is_reported_before_the_first_question(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    (model / "chat_template.jinja").write_text(refuses)
    done = run("chat", model, "--system", "Be brief.")
    assert done.code == 2
    assert "no system role" in done.err


# Sampling ----------------------------------------------------------------------------------------------------------


def test_answers_are_sampled_by_default(tiny_model: Path) -> None:
    seen = succeed("chat", tiny_model, "--max-tokens", 2, "--json", stdin="Hi\n").json["sampling"]
    assert (seen["temperature"], seen["top_p"]) == (0.7, 0.95)


def test_generation_config_decides_what_the_user_does_not(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": 258}
    (model / "generation_config.json").write_text(json.dumps(config))
    seen = succeed("chat", model, "--top-k", 5, "--max-tokens", 2, "--json", stdin="Hi\n").json["sampling"]
    assert (seen["temperature"], seen["top_k"], seen["top_p"], seen["repetition_penalty"]) == (0.6, 5, 1.0, 1.1)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"eos_token_id": 2}, {}),
        ({"repetition_penalty": 1.1}, {}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"top_p": 0.9, "top_k": None}, {"temperature": 1.0, "top_p": 0.9}),
    ],
)
def test_recommended_sampling(config: dict[str, Any], found: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert recommended_sampling(_At(tmp_path)) == found  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"top_p": "much"}, {"top_k": 2.5}, {"temperature": -1}, {"top_p": True}])
def test_generation_config_that_makes_no_sense_is_a_sentence(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(FormatError, match=r"generation_config\.json: .*(top_p|top_k|temperature)"):
        recommended_sampling(_At(tmp_path))  # type: ignore[arg-type]


class _At:
    def __init__(self, path: Path) -> None:
        self.path = path


# A person ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Chat with lines that a person types; an exception among them is raised at the prompt."""

    def talk(*lines: str | BaseException, args: tuple[object, ...] = ()) -> Result:
        waiting = iter(lines)

        def ask() -> str:
            line = next(waiting, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(chat, "_ask", ask)
        monkeypatch.setattr(chat, "_at_a_terminal", lambda: True)
        return succeed("chat", tiny_model, "--max-tokens", 4, *args)

    return talk


def test_banner_names_model_device_sampling_and_the_way_out(typed: Any) -> None:
    shown = typed().err
    for said in ("tiny: not quantized by Crelle, on c", "context 96", "temperature 0.7, top-p 0.95", "/help", "/quit"):
        assert said in shown


def test_commands(typed: Any) -> None:
    done = typed("/help", "", "/nonsense", "Hi", "/reset", "Yo", "/quit", "not read", args=("--json",))
    assert "/reset " in done.err
    assert "Unknown command /nonsense; /help lists the commands." in done.err
    assert [m["content"] for m in done.json["messages"] if m["role"] == "user"] == ["Yo"]


def test_too_long_a_message_is_not_the_end(typed: Any) -> None:
    done = typed("Hi", "x" * 200, "Yo", args=("--json",))
    assert "it was not sent" in done.err
    assert [m["content"] for m in done.json["messages"] if m["role"] == "user"] == ["Hi", "Yo"]


def test_answer_cut_off_by_max_tokens_says_so(typed: Any) -> None:
    assert "(stopped after 4 tokens: --max-tokens)" in typed("Hi", args=GREEDY).err


def test_ctrl_c_stops_the_answer_and_a_second_one_at_the_prompt_quits(
    typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(*_: object) -> Iterator[StreamChunk]:
        yield StreamChunk("so far")
        signal.raise_signal(signal.SIGINT)
        yield StreamChunk(" and never more")

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "stream", endless)
        done = typed("Hi", "Yo", KeyboardInterrupt(), "not read", args=("--json",))
    answers = [m["content"] for m in done.json["messages"] if m["role"] == "assistant"]
    assert answers == ["so far", "so far"]
    assert done.err.count("(stopped)") == 2


def test_one_ctrl_c_at_the_prompt_does_not_quit(typed: Any) -> None:
    done = typed(KeyboardInterrupt(), "Hi", KeyboardInterrupt(), KeyboardInterrupt(), "not read", args=("--json",))
    assert done.err.count("Press Ctrl-C again or type /quit to leave.") == 2
    assert len(done.json["messages"]) == 2


def test_real_terminal_has_line_editing(tiny_model: Path) -> None:
    """Cursor keys and the history work, a half typed line is cleared by Ctrl-C, and /quit leaves."""
    pytest.importorskip("readline")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-m", "crelle.cli.main", "chat", str(tiny_model)])
    try:
        seen = _until(terminal, b"\n> ")
        assert b"/help" in seen
        os.write(terminal, b"/elp\x1b[D\x1b[D\x1b[Dh\n")  # three to the left, then the missing letter
        assert b"/reset " in _until(terminal, b"\n> ")
        os.write(terminal, b"\x1b[A\n")  # the line before, once more
        assert b"/reset " in _until(terminal, b"\n> ")
        _press_ctrl_c(terminal)
        _until(terminal, b"Press Ctrl-C again", b"> ")
        os.write(terminal, b"half a line")
        _until(terminal, b"half a line")
        _press_ctrl_c(terminal)
        _until(terminal, b"\n> ")
        os.write(terminal, b"/quit\n")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(terminal)


def _press_ctrl_c(terminal: int) -> None:
    """Interrupt, as a person would, some time after the last key: readline misses a signal while it draws the line."""
    time.sleep(0.5)
    os.write(terminal, b"\x03")


def _until(terminal: int, *ends: bytes) -> bytes:
    """Return what a terminal shows up to some text, and further up to the next one."""
    seen, deadline, at = b"", time.monotonic() + 120, 0
    for end in ends:
        while (found := _PLAIN.sub(b"", seen).find(end, at)) < 0:
            assert time.monotonic() < deadline, seen
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 4096)
        at = found + len(end)
    return seen
