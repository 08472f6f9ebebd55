"""Parts of the core by themselves, each with no more than what it has to know."""

import pytest

from gpuspill.core.accounting import Charges
from gpuspill.core.budget import Budget
from gpuspill.core.candidates import Candidates
from gpuspill.core.effects import Counters, Effects
from gpuspill.core.ledger import Entry, Ledger
from gpuspill.core.records import Records
from gpuspill.core.residency import Tier


class Books:
    """Values, and what may be evicted."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.ledger = Ledger()
        self.candidates = Candidates(self.ledger, self.held.__contains__)

    def value(self, key: str, nbytes: int = 10) -> Entry:
        entry = self.ledger.create(nbytes)
        self.ledger.bind(key, entry)
        self.candidates.classify(entry)
        return entry

    def refused(self, key: str, need: int) -> Entry:
        """A value that the disk refused."""
        entry = self.value(key)
        self.candidates.unlist(entry.pid)
        entry.refused, entry.need = True, need
        self.candidates.classify(entry)
        return entry


class Disk(Books):
    """Their records, too."""

    def __init__(self, limit: int | None, block_nbytes: int = 1) -> None:
        super().__init__()
        self.effects, self.counters = Effects(), Counters()
        self.records = Records(limit, True, self.ledger, self.candidates, self.effects, self.counters, block_nbytes)

    def clean(self, key: str, nbytes: int) -> Entry:
        """A value with a redundant record of `nbytes`."""
        entry = self.value(key)
        entry.begin(Tier.HOST, Tier.DISK)
        assert self.records.reserve(entry, nbytes)
        entry.complete()
        self.records.keep(entry)
        return entry

    def validate(self) -> None:
        self.candidates.validate()
        self.records.validate()
        self.ledger.validate(sum(entry.nbytes for entry in self.ledger.entries.values()), self.records.disk.used)


class TestCandidates:
    def test_what_is_held_lets_others_go_first_and_is_looked_at_again(self):
        books = Books()
        first, second = books.value("first"), books.value("second")
        books.held.add(first.pid)
        assert books.candidates.next() is second
        assert (books.candidates.held, books.candidates.set_aside) == (1, 1)
        books.candidates.validate()
        books.held.clear()
        books.candidates.unlist(second.pid)
        assert books.candidates.next() is None
        books.candidates.retry(1, 0)
        assert books.candidates.next() is first

    def test_using_what_was_refused_does_not_make_it_go(self):
        books = Books()
        entry = books.refused("a", 10)
        books.candidates.classify(entry)
        assert books.candidates.next() is None
        assert books.candidates
        books.candidates.retry(0, 1)
        assert books.candidates.next() is entry
        books.candidates.validate()

    def test_room_on_disk_is_for_as_many_as_fit_longest_refused_first(self):
        books = Books()
        entries = [books.refused(key, 10) for key in "abc"]
        books.candidates.relieve(15)
        assert [entry.refused for entry in entries] == [False, True, True]
        books.candidates.relieve(5)  # and what was left over before
        assert [entry.refused for entry in entries] == [False, False, True]
        assert books.candidates.relieved == 2
        books.candidates.validate()

    def test_an_index_that_lies_is_noticed(self):
        books = Books()
        entry = books.value("a")
        entry.pin()  # and nobody was told
        with pytest.raises(AssertionError):
            books.candidates.validate()


class TestRecords:
    def test_the_oldest_redundant_record_is_given_up_for_one_that_is_needed(self):
        disk = Disk(100)
        old, new = disk.clean("old", 40), disk.clean("new", 40)
        below = disk.ledger.create(10)
        disk.ledger.bind("below", below)
        assert not disk.records.exceeded(60)
        disk.records.reclaim(60)
        disk.records.enter(below, 60)
        assert disk.effects.take().deleted == [old.pid]
        assert (old.disk_nbytes, new.disk_nbytes, disk.records.disk.used) == (0, 40, 100)
        assert disk.counters.records_reclaimed == 1
        disk.records.validate()
        disk.candidates.validate()

    def test_what_does_not_fit_is_refused_and_nothing_given_up_for_it(self):
        disk = Disk(100)
        disk.clean("clean", 40)
        assert disk.records.promise(101) is None
        assert not disk.effects
        promised = disk.records.promise(80)
        assert promised is not None
        assert disk.records.exceeded(21)
        disk.records.disk.release(promised)
        assert not disk.records.exceeded(100)
        disk.validate()

    def test_a_disk_that_refuses_is_not_asked_by_each_one_that_comes(self):
        disk = Disk(None)
        disk.refused("a", 10)
        assert disk.records.promise(1) is None
        disk.candidates.retry(0, 1)
        assert disk.records.promise(1) is not None

    def test_a_record_that_goes_with_its_value_leaves_room_for_what_was_refused(self):
        disk = Disk(100)
        clean, refused = disk.clean("clean", 40), disk.refused("refused", 40)
        disk.records.forget(clean)
        assert disk.records.disk.used == 0
        assert not refused.refused


def test_the_charges_of_a_value_on_its_way_down_and_back():
    charges = Charges(Budget(None))
    entry = Ledger().create(10)

    def sums() -> tuple[int, ...]:
        charges.validate([entry])
        return charges.memory.used, charges.memory.leaving, charges.spilling, charges.spilled_nbytes, charges.away

    charges.enter(entry)
    assert sums() == (10, 0, 0, 0, 0)
    entry.begin(Tier.HOST, Tier.DISK)
    charges.begin_spill(entry, 10)
    assert sums() == (10, 10, 1, 0, 0)
    charges.resize(entry, 15)
    assert sums() == (15, 15, 1, 0, 0)
    entry.complete()
    charges.end_spill(entry)
    entry.drop(Tier.HOST)
    charges.drop(entry)
    assert sums() == (0, 0, 0, 15, 1)
    entry.begin(Tier.DISK, Tier.HOST)
    charges.begin_restore(entry)
    assert sums() == (15, 0, 0, 0, 1)
    entry.fail()
    charges.fail_restore(entry)
    assert sums() == (0, 0, 0, 15, 1)
    entry.lose(Tier.DISK)
    charges.lose(entry)
    assert sums() == (0, 0, 0, 0, 1)


def test_effects_are_taken_once():
    effects = Effects()
    effects.dropped.append(1)
    taken = effects.take()
    assert taken.dropped == [1]
    assert not effects
    effects.dropped.append(2)
    assert taken.dropped == [1]


class TestBlocks:
    def test_a_record_takes_whole_blocks(self) -> None:
        """Twenty thousand numbers of 24 bytes take 80 MB on disk, whatever their files say."""
        disk = Disk(8192, block_nbytes=4096)
        disk.clean("a", 24)
        disk.clean("b", 4096)
        assert disk.records.disk.used == 8192
        value = disk.value("c")
        value.begin(Tier.HOST, Tier.DISK)
        assert disk.records.reserve(value, 1), "in the place of the oldest"
        assert disk.records.disk.used == 8192
        disk.records.written(value, 4097)
        assert disk.records.disk.used == 3 * 4096
        disk.records.unwritten(value)
        assert disk.records.disk.used == 4096
        assert disk.records.promise(1) is not None
        assert disk.records.promise(4097) is None
