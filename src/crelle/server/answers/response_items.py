"""Answers of POST /v1/responses: items that grow, whole or as OpenAI's events."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from crelle.engine.requests.output import Event, Output
from crelle.server.answers.chat_answer import Parts
from crelle.server.responses import ResponseBuilder
from crelle.server.schema.response_api import Respond
from crelle.server.schema.strict_json import encode

Item = dict[str, Any]
_FIELDS = ("instructions", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "text", "metadata")


class ItemBuilder(ResponseBuilder):
    """Builds the answer to one request: reasoning, a message and calls, in the order in which they come."""

    _asked: Respond
    _items: list[Item]

    def begin(self, asked: Respond) -> "ItemBuilder":
        """Take what was asked for, which the answer repeats."""
        self._asked, self._items, self._number = asked, [], 0
        self.id = f"resp_{secrets.token_hex(12)}"
        return self

    def note(self, index: int, event: Event) -> Parts:
        parts = super().note(index, event)
        self._take(parts)
        return parts

    def whole(self, outputs: Sequence[Output], cut: str | None = None) -> Any:
        self._close()
        return msgspec.Raw(encode(self._response(outputs)))

    def opening(self) -> bytes:
        return b""  # events are numbered: what opens the stream is made with the first of them

    def chunk(self, index: int, event: Event, cut: str | None = None) -> bytes:
        head = b"" if self._number else self._opening()
        return head + self._take(super().note(index, event))

    def _opening(self) -> bytes:
        response = self._response(())
        return b"".join(self._event(name, response=response) for name in ("response.created", "response.in_progress"))

    def closing(self, outputs: Sequence[Output]) -> bytes:
        response = self._close()
        found = self._response(outputs)
        return response + self._event(f"response.{found['status']}", response=found)

    # Items -----------------------------------------------------------------------------------------------------------

    def _take(self, parts: Parts) -> bytes:
        """Add what became certain to the items; return the events that say so."""
        found = b""
        if parts.reasoning:
            found += self._begin("reasoning", {"summary": [], "content": []})
            found += self._add(parts.reasoning, "response.reasoning_text")
        if parts.content:
            found += self._begin("message", {"role": "assistant", "content": []})
            found += self._add(parts.content, "response.output_text")
        for call in parts.calls:
            if call.id:
                found += self._close()
                fields = {"call_id": call.id, "name": call.name, "arguments": ""}
                found += self._begin("function_call", fields)
            if call.arguments:
                self._items[-1]["arguments"] += call.arguments
                found += self._of_item("response.function_call_arguments.delta", delta=call.arguments)
        return found

    def _begin(self, kind: str, fields: Item) -> bytes:
        """Begin an item, unless the last one is of this kind and goes on."""
        last = self._items[-1] if self._items else None
        if last is not None and last["type"] == kind and last["status"] == "in_progress":
            return b""
        found = self._close()
        short = {"message": "msg", "function_call": "fc", "reasoning": "rs"}[kind]
        item = {"id": f"{short}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        found += self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if kind == "function_call":
            return found
        part: Item = {"type": "output_text", "text": "", "annotations": []}
        part = part if kind == "message" else {"type": "reasoning_text", "text": ""}
        item["content"].append(part)
        return found + (self._of_item("response.content_part.added", content_index=0, part=part))

    def _add(self, text: str, name: str) -> bytes:
        self._items[-1]["content"][0]["text"] += text
        more: Item = {"logprobs": []} if name == "response.output_text" else {}
        return self._of_item(f"{name}.delta", content_index=0, delta=text, **more)

    def _close(self) -> bytes:
        """End the last item, where it is open."""
        item = self._items[-1] if self._items else None
        if item is None or item["status"] != "in_progress":
            return b""
        item["status"] = "completed"
        if item["type"] == "function_call":
            more = {"arguments": item["arguments"], "name": item["name"]}
            found = self._of_item("response.function_call_arguments.done", **more)
        else:
            part = item["content"][0]
            name = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
            more = {"logprobs": list[Any]()} if item["type"] == "message" else {}
            found = self._of_item(f"{name}.done", content_index=0, text=part["text"], **more)
            found += self._of_item("response.content_part.done", content_index=0, part=part)
        return found + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _of_item(self, event: str, /, **fields: Any) -> bytes:
        return self._event(event, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, event: str, /, **fields: Any) -> bytes:
        if not self.params.stream:
            return b""
        data = encode({"type": event, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"

    def _response(self, outputs: Sequence[Output]) -> Item:
        """Return the whole answer; outputs: none while it runs."""
        ended = outputs[0].completion.finish_reason if outputs else None
        status = "in_progress" if ended is None else "completed" if ended == "stop" else "incomplete"
        repeated = {name: msgspec.to_builtins(getattr(self._asked, name)) for name in _FIELDS}
        found = {
            "id": self.id,
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items,
            **repeated,
            "tools": repeated["tools"] or [],
            "tool_choice": repeated["tool_choice"] or "auto",
            "parallel_tool_calls": self._asked.parallel_tool_calls is not False,
            "max_output_tokens": self._asked.max_output_tokens,
            "store": False,
            "previous_response_id": None,
            "usage": None,
        }
        if outputs:
            u = self.usage(outputs)
            found["usage"] = {
                "input_tokens": u.prompt_tokens,
                "input_tokens_details": {"cached_tokens": u.prompt_tokens_details.cached_tokens},
                "output_tokens": u.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": u.completion_tokens_details.reasoning_tokens},
                "total_tokens": u.total_tokens,
            }
        return found
