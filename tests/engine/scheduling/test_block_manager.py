"""Pages: none is lost, none is written that another can see, and a shared page holds exactly the text it stands for."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sampled_cases import share_of

from crelle.engine.block_manager import BlockManager, BlockTable, Copy
from crelle.errors import SchemeError

ALIKE = 2**61 - 1  # hash(ALIKE) == hash(0): two ids that a hash cannot tell apart


def store(blocks: BlockManager, ids: list[int], namespace: object = "m") -> BlockTable:
    """Open a table for ids and compute them all."""
    table = blocks.table(namespace)
    assert blocks.open(table, ids)
    blocks.commit(table, ids, len(ids))
    return table


def counts(blocks: BlockManager) -> tuple[int, int, int]:
    return blocks.used, blocks.cached, blocks.free


# By hand -----------------------------------------------------------------------------------------------------------


def test_pages_go_from_free_to_used_to_cached_and_are_evicted_when_none_is_free() -> None:
    blocks = BlockManager(6, 4)
    table = store(blocks, list(range(10)))
    assert counts(blocks) == (3, 0, 3)
    blocks.release(table)
    assert counts(blocks) == (0, 2, 4)  # the half-filled page is forgotten
    store(blocks, [9] * 20)
    assert counts(blocks) == (5, 1, 0)


def test_end_of_a_text_is_evicted_before_its_beginning() -> None:
    blocks = BlockManager(3, 4)
    blocks.release(store(blocks, list(range(12))))
    blocks.release(store(blocks, [50, 51]))
    table = blocks.table("m")
    assert blocks.adopt(table, list(range(13))) == 8


def test_longest_unused_text_is_evicted_first() -> None:
    blocks = BlockManager(4, 4)
    for first in (10, 20, 30):
        blocks.release(store(blocks, [first] * 4))
    blocks.release(store(blocks, [10] * 4 + [1]))  # used again
    held = store(blocks, [0] * 5)
    assert len(held.pages) == 2
    again = {}
    for first in (10, 20, 30):
        table = blocks.table("m")
        again[first] = blocks.adopt(table, [first] * 5)
        blocks.release(table)
    assert again == {10: 4, 20: 0, 30: 4}


def test_prefix_of_a_living_sequence_is_shared() -> None:
    blocks = BlockManager(10, 4)
    first = store(blocks, [*range(8), 50, 51])
    second = blocks.table("m")
    assert blocks.open(second, [*range(8), 60, 61])
    assert (second.length, second.pages[:2], blocks.used) == (8, first.pages[:2], 4)


def test_prefix_of_a_departed_sequence_comes_back_from_the_cache() -> None:
    blocks = BlockManager(4, 4)
    first = store(blocks, list(range(9)))
    pages = list(first.pages)
    blocks.release(first)
    second = blocks.table("m")
    assert blocks.open(second, list(range(9)))
    assert (second.length, second.pages[:2]) == (8, pages[:2])


@pytest.mark.parametrize(("length", "shared"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_last_token_is_always_left_to_compute(length: int, shared: int) -> None:
    blocks = BlockManager(10, 4)
    store(blocks, list(range(12)))
    table = blocks.table("m")
    assert blocks.open(table, list(range(length)))
    assert table.length == shared


def test_same_page_behind_another_beginning_is_another_page() -> None:
    blocks = BlockManager(10, 4)
    store(blocks, [1, 1, 1, 1, 7, 7, 7, 7, 0])
    store(blocks, [2, 2, 2, 2, 7, 7, 7, 7, 0])
    assert blocks.used == 6


def test_namespaces_share_nothing() -> None:
    blocks = BlockManager(12, 4)
    for namespace in ("m", "n", 0, (2, None)):  # 0 is also the number of a page
        store(blocks, list(range(9)), namespace)
    assert blocks.used == 12


def test_colliding_hashes_are_told_apart() -> None:
    blocks = BlockManager(10, 2)
    a, b = [0, 0, 0, 0, 0], [ALIKE, 0, 0, ALIKE, 0]
    assert hash(tuple(a[:2])) == hash(tuple(b[:2]))
    first = store(blocks, a)
    table = blocks.table("m")
    assert blocks.adopt(table, b) == 0
    second = store(blocks, b)
    assert not set(first.pages) & set(second.pages)


def test_without_sharing_nothing_is_kept() -> None:
    blocks = BlockManager(10, 4, sharing=False)
    tables = [store(blocks, list(range(9))) for _ in range(2)]
    assert counts(blocks) == (6, 0, 4)
    for table in tables:
        blocks.release(table)
    assert counts(blocks) == (0, 0, 10)


def test_two_who_computed_the_same_page_end_up_with_one() -> None:
    blocks = BlockManager(10, 4)
    ids = list(range(6))
    tables = [blocks.table("m") for _ in range(3)]
    assert all(blocks.open(table, ids) for table in tables)
    assert blocks.used == 6
    for table in tables:
        blocks.commit(table, ids, 6)
    assert blocks.used == 4
    blocks.assert_consistent(tables)


def test_page_that_another_finished_meanwhile_replaces_a_half_computed_one() -> None:
    blocks = BlockManager(10, 4)
    ids = list(range(9))
    slow = blocks.table("m")
    assert blocks.open(slow, ids)
    blocks.commit(slow, ids, 2)
    quick = store(blocks, ids)
    assert blocks.adopt(slow, ids) == 6
    assert slow.pages[:2] == quick.pages[:2]
    blocks.assert_consistent([slow, quick])


def test_forks_copy_the_page_they_write_and_the_last_one_writes_in_place() -> None:
    blocks = BlockManager(10, 4)
    first = store(blocks, list(range(6)))
    shared = first.pages[1]
    tables = [first, blocks.fork(first), blocks.fork(first)]
    assert blocks.used == 2
    assert blocks.need((t, 7) for t in tables) == 2
    assert blocks.need((t, 7) for t in tables[:2]) == 2  # the third still sees the page
    copies = [copy for t in tables for copy in blocks.grow(t, 7)]
    assert copies == [Copy(shared, tables[0].pages[1]), Copy(shared, tables[1].pages[1])]
    assert tables[2].pages[1] == shared
    assert blocks.used == 4
    blocks.assert_consistent(tables)


def test_forks_at_a_page_boundary_copy_nothing() -> None:
    blocks = BlockManager(10, 4)
    first = store(blocks, list(range(8)))
    second = blocks.fork(first)
    assert blocks.grow(first, 9) + blocks.grow(second, 9) == []
    assert blocks.used == 4


def test_open_leaves_the_spare_pages_alone_and_else_changes_nothing() -> None:
    blocks = BlockManager(4, 4)
    table = blocks.table("m")
    assert not blocks.open(table, [1] * 9, watermark=2)
    assert (table.pages, table.length, counts(blocks)) == ([], 0, (0, 0, 4))
    assert blocks.open(table, [1] * 9, watermark=1)


@pytest.mark.parametrize(("pages", "page"), [(0, 16), (4, 0), (-1, 16)])
def test_cache_of_nothing_is_refused(pages: int, page: int) -> None:
    with pytest.raises(SchemeError, match=f"got {pages} pages of {page}"):
        BlockManager(pages, page)


# Under random traffic ----------------------------------------------------------------------------------------------


class Pages(RuleBasedStateMachine):
    """Every token writes the whole text before it into its place: what a table sees must be exactly its own text."""

    @initialize(pages=st.integers(1, 12), page=st.integers(1, 4), sharing=st.sampled_from([True, True, False]))
    def begin(self, pages: int, page: int, sharing: bool) -> None:
        self.blocks = BlockManager(pages, page, sharing=sharing)
        self.memory: list[list[object]] = [[None] * page for _ in range(pages)]
        self.alive: list[tuple[BlockTable, list[int]]] = []

    def write(self, table: BlockTable, ids: list[int], end: int) -> None:
        others = {p for t, _ in self.alive if t is not table for p in t.pages}
        for i in range(table.length, end):
            page = table.pages[i // self.blocks.page]
            assert page not in others, "a page is written that another table sees"
            self.memory[page][i % self.blocks.page] = (table.root, *ids[: i + 1])
        self.blocks.commit(table, ids, end)

    @rule(
        ids=st.lists(st.sampled_from([0, ALIKE, 1]), min_size=1, max_size=14),
        namespace=st.sampled_from([0, 1]),
        watermark=st.integers(0, 2),
    )
    def open(self, ids: list[int], namespace: int, watermark: int) -> None:
        table, before = self.blocks.table(namespace), counts(self.blocks)
        if self.blocks.open(table, ids, watermark):
            self.alive.append((table, ids))
            assert self.blocks.available >= watermark
            assert table.length < len(ids)
        else:
            assert counts(self.blocks) == before

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), tokens=st.integers(1, 5))
    def compute(self, data: st.DataObject, tokens: int) -> None:
        """Run over a part of what a table has no keys and values for yet."""
        table, ids = data.draw(st.sampled_from(self.alive))
        if self.blocks.need([(table, len(ids))]) == 0:
            self.blocks.adopt(table, ids)
            self.write(table, ids, min(len(ids), table.length + tokens))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """Add a token to several tables, as a decoding step does."""
        chosen = data.draw(st.lists(st.sampled_from(self.alive), unique_by=lambda a: id(a[0])))
        chosen = [(t, ids) for t, ids in chosen if t.length == len(ids)]
        need, available = self.blocks.need((t, len(ids) + 1) for t, ids in chosen), self.blocks.available
        if need > available:
            return
        copies = [copy for t, ids in chosen for copy in self.blocks.grow(t, len(ids) + 1)]
        assert available - self.blocks.available == need
        targets = [c.target for c in copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {c.source for c in copies}
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        for t, ids in chosen:
            ids.append(data.draw(st.sampled_from([0, ALIKE, 1])))
            self.write(t, ids, len(ids))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, ids = data.draw(st.sampled_from(self.alive))
        if table.length == len(ids):
            before = counts(self.blocks)
            self.alive.append((self.blocks.fork(table), list(ids)))
            assert counts(self.blocks) == before

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table, _ = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.blocks.release(table)
        assert (table.pages, table.length) == ([], 0)

    @invariant()
    def tables_see_their_own_text(self) -> None:
        for table, ids in self.alive:
            for i in range(table.length):
                place = self.memory[table.pages[i // self.blocks.page]][i % self.blocks.page]
                assert place == (table.root, *ids[: i + 1])

    @invariant()
    def accounts_are_exact(self) -> None:
        self.blocks.assert_consistent(t for t, _ in self.alive)
        assert sum(counts(self.blocks)) == self.blocks.pages
        assert self.blocks.used == len({p for t, _ in self.alive for p in t.pages})

    def teardown(self) -> None:
        if hasattr(self, "blocks"):
            for table, _ in self.alive:
                self.blocks.release(table)
            self.blocks.assert_consistent([])
            assert self.blocks.used == 0


TestPages = Pages.TestCase
TestPages.settings = settings(deadline=None, max_examples=share_of(150), stateful_step_count=40)
