"""Launch plans of a weight: kernel, tile config, grid and sizes, worked out once for each number of rows and dtype.

A plan holds no kernel and no tensor of an input: `load` is asked at every launch, since it also records.
"""

from typing import Any

_MOST = 64  # prompts of many lengths: forget rather than grow


class Plans(dict[Any, Any]):
    """Plans of one weight, by what they depend on."""

    def __setitem__(self, key: Any, plan: Any) -> None:
        if len(self) >= _MOST:
            self.clear()
        super().__setitem__(key, plan)

    def __reduce__(self) -> Any:
        """A copy of a weight has other addresses: its plans are made anew."""
        return Plans, ()
