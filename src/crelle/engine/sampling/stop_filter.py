"""Ends a completion at its stop strings."""

from crelle.engine.tokenization.tokenizer import Detokenizer


class StopFilter:
    """Passes text on, but holds back what may turn out to be the beginning of a stop string."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        """Take the stop strings; min_tokens: before which none is looked for."""
        self._detokenizer, self._stop, self._early = detokenizer, stop, min_tokens
        self._all, self._given = "", 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text that was let through."""
        return self._all[: self._given]

    def push(self, token: int) -> str:
        text = self._detokenizer.push(token)
        if self._early:
            self._early -= 1
            self._all += text
            self._given = len(self._all)
            return text
        return self._let(text, hold=True)

    def finish(self) -> str:
        return "" if self.stopped else self._let(self._detokenizer.finish(), hold=False)

    def _let(self, text: str, hold: bool) -> str:
        self._all += text
        if not self._stop:
            self._given = len(self._all)
            return text
        found = [(i + len(s), i) for s in self._stop if (i := self._all.find(s, self._given)) >= 0]
        if found:
            self.stopped, end = True, min(found)[1]  # the one that is complete first, however the text was split
        else:
            end = len(self._all) - (self._held() if hold else 0)
        piece, self._given = self._all[self._given : end], end
        return piece

    def _held(self) -> int:
        """How many characters at the end could begin a stop string."""
        pending = len(self._all) - self._given
        for n in range(min(pending, max(map(len, self._stop), default=1) - 1), 0, -1):
            if any(s.startswith(self._all[-n:]) for s in self._stop):
                return n
        return 0
