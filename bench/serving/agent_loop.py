"""An agent's loop against a server: a calculator as its only tool, which every answer must call.

    python bench/serving/agent_loop.py URL OUT.json [--steps 10] [--loops 5]

Each step sends the conversation so far with `tool_choice="required"`, parses the call, computes, and adds the result;
every second loop is streamed. Small models compute nonsense: what counts is that every call names the tool and that
its arguments are JSON of the schema. Exit status 1: some call does not parse.
"""

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import jsonschema_rs
from openai import OpenAI

from crelle.bench.environment import write_result

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -9999, "maximum": 9999},
        "operator": {"enum": ["+", "-", "*"]},
        "b": {"type": "integer", "minimum": -9999, "maximum": 9999},
    },
    "required": ["a", "operator", "b"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "calculate", "description": "Apply an operator to two numbers", "parameters": PARAMETERS},
}
TASK = "Add the numbers from {first} to {last}, one after the other, with the calculator."


def call(client: OpenAI, model: str, messages: list[Any], streamed: bool) -> tuple[str, str, str]:
    """Return id, name and arguments of the one tool call of an answer, all empty where it has none."""
    options: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 96}
    if not streamed:
        answer = client.chat.completions.create(model=model, messages=messages, **options)
        for found in answer.choices[0].message.tool_calls or ():
            return found.id, found.function.name, found.function.arguments
        return "", "", ""
    name, arguments, its_id = "", "", ""
    for event in client.chat.completions.create(model=model, messages=messages, stream=True, **options):
        for delta in event.choices[0].delta.tool_calls or () if event.choices else ():
            its_id = delta.id or its_id
            name += (delta.function and delta.function.name) or ""
            arguments += (delta.function and delta.function.arguments) or ""
    return its_id, name, arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, like http://127.0.0.1:8000")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--loops", type=int, default=5)
    args = parser.parse_args()
    valid, rows = jsonschema_rs.validator_for(PARAMETERS), list[dict[str, Any]]()
    with OpenAI(base_url=f"{args.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        model = client.models.list().data[0].id
        for i in range(args.loops):
            messages: list[Any] = [{"role": "user", "content": TASK.format(first=i + 1, last=i + args.steps)}]
            begun, parsed, shown = perf_counter(), 0, []
            for _ in range(args.steps):
                its_id, name, text = call(client, model, messages, streamed=i % 2 == 1)
                try:
                    given = json.loads(text)
                    right = name == "calculate" and valid.is_valid(given)
                except ValueError:
                    right = False
                if not right:
                    print(f"loop {i}: {name}({text!r}) does not parse", flush=True)
                    break
                parsed += 1
                a, operator, b = given["a"], given["operator"], given["b"]
                result = {"+": a + b, "-": a - b, "*": a * b}[operator]
                shown.append(f"{a} {operator} {b} = {result}")
                asked = {"id": its_id, "type": "function", "function": {"name": name, "arguments": text}}
                messages.append({"role": "assistant", "content": None, "tool_calls": [asked]})
                messages.append({"role": "tool", "tool_call_id": its_id, "content": str(result)})
            row = {"streamed": i % 2 == 1, "steps": args.steps, "parsed": parsed, "seconds": perf_counter() - begun}
            rows.append(row | {"calls": shown})
            print(row, flush=True)
    command = f"python bench/serving/agent_loop.py URL {args.out.name} --steps {args.steps} --loops {args.loops}"
    write_result(args.out, {"command": command, "model": model, "rows": rows})
    raise SystemExit(any(row["parsed"] < args.steps for row in rows))


if __name__ == "__main__":
    main()
