"""Host memory is registered in pieces, all or nothing (R21)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from rayhicache.device.cuda.registration import HostRegistration
from rayhicache.errors import InvalidRequest

RECORD, BASE = 48, 1 << 20


class FakeDriver:
    """Knows what is registered; refuses the piece that it is told to."""

    def __init__(self, refuses: int = -1) -> None:
        self.pieces: dict[int, int] = {}
        self.calls = 0
        self._refuses = refuses

    def register(self, address: int, nbytes: int) -> int:
        self.calls += 1
        if self.calls == self._refuses:
            return 2
        self.pieces[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        del self.pieces[address]
        return 0


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def registration(
    driver: FakeDriver, nbytes: int = 20 * RECORD, base: int = BASE
) -> HostRegistration:
    return HostRegistration(
        base,
        nbytes,
        RECORD,
        register=driver.register,
        unregister=driver.unregister,
        piece_bytes=100,
        pause=lambda seconds: None,
    )


@pytest.fixture
def whole(driver: FakeDriver) -> Iterator[HostRegistration]:
    made = registration(driver)
    yield made
    made.close()


def test_edges_of_pieces_are_multiples_of_the_record(
    driver: FakeDriver, whole: HostRegistration
) -> None:
    assert whole.wait(10)
    assert whole.ready_bytes == 20 * RECORD
    assert all((address - BASE) % RECORD == 0 for address in driver.pieces)
    assert sum(driver.pieces.values()) == 20 * RECORD
    assert len(driver.pieces) == 10


def test_a_refused_piece_takes_the_earlier_ones_back_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = FakeDriver(refuses=4)
    with caplog.at_level(logging.WARNING):
        made = registration(driver)
        assert not made.wait(10)
    assert made.ready_bytes == 0
    assert driver.pieces == {}
    assert len(caplog.records) == 1
    made.close()


def test_a_second_registration_is_refused_before_the_driver_sees_it(
    driver: FakeDriver, whole: HostRegistration
) -> None:
    assert whole.wait(10)
    calls = driver.calls
    with pytest.raises(InvalidRequest, match="registered already"):
        registration(driver, base=BASE + 5 * RECORD)
    assert driver.calls == calls


def test_closing_unregisters_everything_and_frees_the_range(driver: FakeDriver) -> None:
    made = registration(driver)
    assert made.wait(10)
    made.close()
    made.close()
    assert driver.pieces == {}
    again = registration(driver)
    assert again.wait(10)
    again.close()
