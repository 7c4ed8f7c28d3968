"""What became of the tokens that were guessed, in words."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crelle.engine.requests.output import Completion


def drafts(done: "Completion") -> str:
    """Return how many of a completion's guessed tokens were right, followed by a comma; nothing without any."""
    return f"{done.accepted} of {done.drafted} guessed tokens accepted, " if done.drafted else ""
