"""Block tables: which page of the KV cache belongs to which sequence. The pages themselves are the runner's.

The cache is a fixed number of pages of `page` tokens. A sequence has a table: the pages that hold its tokens, in
order. Every page is in exactly one of three states, and their counts always sum to `pages`:

    used     in one table or in several (its reference count says in how many)
    cached   in no table, but what it holds is known, and a request with the same tokens gets it back
    free     in no table, holding nothing of use

Three things make pages go further:

Prefix sharing.   A full page is entered in an index under (the page before it, its token ids). The index is a hash
    chain: the key of a page contains its predecessor, down to a root that names model and precision, so equal keys
    mean equal tokens from the very first one. Python's dict compares whole keys after a hash hit: a collision of
    hashes costs time and never gives a wrong page. A page that is in the index is never written again.
Sampled tokens.   Where prompts run through other kernels than sampled tokens, and bits matter, a key also says how
    many of the page's tokens were sampled: a page is found again only where it has the same bits.
Caching.          When its last user leaves, a page of the index is not wiped: it becomes `cached`, and is evicted only
    when a page is needed and none is free, the longest unused first. A table is released from its end, so no page is
    evicted before its successors, and a key's predecessor (a page id) cannot change its meaning.
Copy on write.    A forked table shares all pages, the half-filled last one too. Who first writes into a page that
    others see gets a copy (`grow` says which); the last one that is left writes in place.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from crelle.errors import SchemeError


class Copy(NamedTuple):
    """A page to be copied before the step runs."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Root:
    """Where a chain begins; nothing is shared between roots."""

    namespace: Hashable


@dataclass(slots=True, eq=False)
class BlockTable:
    """The pages of one sequence: token i lies in pages[i // page], at i % page."""

    root: Root
    prompt: int | None = None  # its tokens behind so many were sampled; None: that makes no difference to their keys
    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens whose keys and values are stored


Key = tuple[int | Root, tuple[int, ...], int]  # the page before, its ids, how many of them count as sampled


class BlockManager:
    """Allocates, shares and frees pages."""

    def __init__(self, pages: int, page: int, *, sharing: bool = True, max_pages: int | None = None) -> None:
        """Begin with all pages free; max_pages: to which `grow_pool` may lead, default: no more than there are."""
        if pages < 1 or page < 1:
            raise SchemeError(f"a KV cache needs at least one page of one token, got {pages} pages of {page}")
        self.pages, self.page, self.sharing = pages, page, sharing
        self.max_pages = max(pages, max_pages or 0)
        self.reset()

    def reset(self) -> None:
        """Forget everything: all pages are free. Owners of tables empty them."""
        self._references = [0] * self.pages
        self._free = list(reversed(range(self.pages)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._index: dict[Key, int] = {}
        self._key: dict[int, Key] = {}  # of every page in the index

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.pages - self.free - self.cached

    @property
    def available(self) -> int:
        """Pages that can be had now."""
        return self.free + self.cached

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def grow_pool(self, more: int) -> None:
        """Add free pages behind those that are there."""
        self._references += [0] * more
        self._free[:0] = range(self.pages + more - 1, self.pages - 1, -1)
        self.pages += more

    def table(self, namespace: Hashable, prompt: int | None = None) -> BlockTable:
        """Return an empty table; it shares pages only with tables of the same namespace.

        prompt: tokens of the prompt, where a token has other bits as part of a prompt than when it was sampled.
        """
        return BlockTable(Root(namespace), prompt)

    # A table's life: open, (adopt,) grow, commit, …, release ------------------------------------------------------

    def open(self, table: BlockTable, ids: Sequence[int], watermark: int = 0) -> bool:
        """Give an empty table all pages for `ids`, shared ones where possible, if `watermark` others stay available.

        Returns False, and changes nothing, where they do not.
        """
        assert not table.pages
        self.adopt(table, ids)
        if self.need([(table, len(ids))]) + watermark > self.available:
            self.release(table)
            return False
        self.grow(table, len(ids))
        return True

    def adopt(self, table: BlockTable, ids: Sequence[int]) -> int:
        """Take over pages that others have computed, from `table.length` on; return how many tokens that saves.

        The last id is always left to compute: its logits are wanted.
        """
        before = table.length
        while (key := self.next_key(table, ids)) is not None and (known := self._index.get(key)) is not None:
            at = table.length // self.page
            self._take(known)
            if at < len(table.pages):
                self._drop(table.pages[at])
                table.pages[at] = known
            else:
                table.pages.append(known)
            table.length = (at + 1) * self.page
        return table.length - before

    def next_key(self, table: BlockTable, ids: Sequence[int]) -> Key | None:
        """Name the first page that is not complete yet; None where `ids` do not fill it and go on."""
        at = table.length // self.page
        return self._key_of(table, ids, at) if (at + 1) * self.page < len(ids) else None

    def need(self, growth: Iterable[tuple[BlockTable, int]]) -> int:
        """Count the pages that it takes to grow all of these tables to these lengths, copies included."""
        fresh, writers = 0, Counter[int]()
        for table, length in growth:
            fresh += max(0, self.pages_for(length) - len(table.pages))
            for page in self._writable(table):
                if self._references[page] > 1:
                    writers[page] += 1
        return fresh + sum(min(n, self._references[p] - 1) for p, n in writers.items())

    def grow(self, table: BlockTable, length: int) -> list[Copy]:
        """Make the places from `table.length` to `length` writable for this table alone; return what to copy first.

        The caller has asked `need` before.
        """
        copies = []
        for at, page in enumerate(self._writable(table), table.length // self.page):
            if self._references[page] > 1:
                table.pages[at] = self._new()
                copies.append(Copy(page, table.pages[at]))
                self._drop(page)
        while len(table.pages) < self.pages_for(length):
            table.pages.append(self._new())
        return copies

    def commit(self, table: BlockTable, ids: Sequence[int], length: int) -> None:
        """Note that the first `length` ids are stored, and enter the pages that became full in the index.

        Where the index has such a page already, the table changes over to it and its own becomes free.
        """
        assert table.length <= length <= min(len(ids), len(table.pages) * self.page)
        for at in range(table.length // self.page, length // self.page) if self.sharing else ():
            key, page = self._key_of(table, ids, at), table.pages[at]
            known = self._index.setdefault(key, page)
            if known == page:
                self._key[page] = key
            else:
                self._take(known)
                self._drop(page)
                table.pages[at] = known
        table.length = length

    def trim(self, table: BlockTable) -> None:
        """Give back the pages after `table.length`, which held tokens that were drafted and not accepted."""
        while len(table.pages) > self.pages_for(table.length):
            self._drop(table.pages.pop())

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table over the same pages; costs nothing until one of the two writes."""
        for page in table.pages:
            self._take(page)
        return BlockTable(table.root, table.prompt, list(table.pages), table.length)

    def release(self, table: BlockTable) -> None:
        """Give all pages back; the table is empty then and may be opened again.

        Page by page, so that a call that was interrupted can be repeated.
        """
        while table.pages:  # from the last, so that the end of a sequence is evicted before its beginning
            self._drop(table.pages[-1])
            table.pages.pop()
        table.length = 0

    # Single pages --------------------------------------------------------------------------------------------------

    def _key_of(self, table: BlockTable, ids: Sequence[int], at: int) -> Key:
        before = table.pages[at - 1] if at else table.root
        end = (at + 1) * self.page
        sampled = 0 if table.prompt is None else min(max(0, end - table.prompt), self.page)
        return before, tuple(ids[end - self.page : end]), sampled

    def _writable(self, table: BlockTable) -> list[int]:
        return table.pages[table.length // self.page :]

    def _new(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._index[self._key.pop(page)]
        self._references[page] = 1
        return page

    def _take(self, page: int) -> None:
        if self._references[page] == 0:
            del self._cached[page]
        self._references[page] += 1

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            if page in self._key:
                self._cached[page] = None
            else:
                self._free.append(page)

    def assert_consistent(self, tables: Iterable[BlockTable]) -> None:
        """Check every invariant of the module's docstring against the tables that are alive."""
        tables = list(tables)
        held = Counter(page for table in tables for page in table.pages)
        assert [held[page] for page in range(self.pages)] == self._references, "reference counts are off"
        idle = [*self._free, *self._cached]
        assert len(idle) == len(set(idle)) == self.pages - len(held), "a page is lost, or in two states at once"
        assert not held.keys() & set(idle), "a page in use was given back"
        assert {page: key for key, page in self._index.items()} == self._key, "the index and its reverse differ"
        assert self._cached.keys() <= self._key.keys(), "a cached page is not known"
        assert not self._key.keys() & set(self._free), "a free page is still in the index"
        order = {page: i for i, page in enumerate(self._cached)}
        for page, (before, ids, _) in self._key.items():
            assert len(ids) == self.page
            if isinstance(before, int):
                assert before in self._key, "a page outlived its predecessor"
                assert page in order or before not in order, "a page is used and its predecessor is not"
                assert order.get(page, -1) < order.get(before, self.pages) or page not in order, "evicted too early"
        for table in tables:
            full = table.length // self.page
            assert table.length <= len(table.pages) * self.page
            assert len(set(table.pages)) == len(table.pages), "a table holds a page twice"
            if self.sharing:
                assert all(page in self._key for page in table.pages[:full]), "a full page is not known"
            assert not any(page in self._key for page in table.pages[full:]), "a page that will be written is shared"
