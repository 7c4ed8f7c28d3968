"""Splits what a model thinks from what it answers: <think>…</think>, where its chat template writes that mark."""

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Takes an answer piece by piece; holds back what may be the beginning of a mark."""

    def __init__(self, prompt_ends_within: bool) -> None:
        """prompt_ends_within: the template has opened the mark already."""
        self._held, self._began = "", prompt_ends_within
        self._state = "reasoning" if prompt_ends_within else "start"

    @property
    def reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._state == "reasoning"

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Return (reasoning, content) that are certain."""
        self._held += text
        thought = ""
        if self._state == "start":
            bare = self._held.lstrip()
            if bare.startswith(OPEN):
                self._held, self._state, self._began = bare[len(OPEN) :], "reasoning", True
            elif final or not OPEN.startswith(bare):
                self._state = "content"
        if self._state == "reasoning":
            end = self._held.find(CLOSE)
            if end >= 0:
                thought, self._held = self._held[:end], self._held[end + len(CLOSE) :]
                self._state = "gap"
            else:
                keep = 0 if final else overlap(self._held, CLOSE)
                cut = len(self._held) - keep
                thought, self._held = self._held[:cut], self._held[cut:]
        if self._state == "gap":  # white space between the mark and the answer belongs to neither
            self._held = self._held.lstrip()
            if self._held:
                self._state = "content"
        content = ""
        if self._state == "content":
            content, self._held = self._held, ""
        return thought, content


def overlap(text: str, mark: str) -> int:
    """How many characters at the end may begin a mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


def split(text: str, prompt_ends_within: bool) -> tuple[str, str]:
    """Return (reasoning, content) of a whole answer."""
    return ReasoningSplitter(prompt_ends_within).push(text, final=True)
