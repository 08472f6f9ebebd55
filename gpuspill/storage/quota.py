"""Bytes on disk: promised before they are written, given back when they are gone."""

from __future__ import annotations

from gpuspill import forks
from gpuspill.errors import QuotaExceeded

__all__ = ["Quota", "Reservation"]


class Quota:
    """A number of bytes that writers share.

    Parameters
    ----------
    limit
        Most bytes in use and reserved together; None for no limit.
    where
        What the quota is for; used in messages.

    Notes
    -----
    Thread-safe. The lock covers additions only. It is re-entrant, since a finaliser may look at the levels in the
    middle of one; changes from there are the store's to forbid.
    """

    def __init__(self, limit: int | None, where: str = "this store") -> None:
        _check(limit)
        self._limit = limit
        self._where = where
        self._lock = forks.lock()
        self._used = 0
        self._reserved = 0

    @property
    def limit(self) -> int | None:
        """Most bytes in use and reserved together; None for no limit."""
        return self._limit

    def set_limit(self, limit: int | None) -> None:
        """Change the limit. What is in use or reserved beyond a lower one stays; more has to wait until it fits."""
        _check(limit)
        with self._lock:
            self._limit = limit

    def reserve(self, nbytes: int) -> Reservation:
        """Promise `nbytes` bytes to the caller, who has to commit or release them.

        Raises
        ------
        QuotaExceeded
            They do not fit beside what is used and reserved.
        """
        self._change(nbytes)
        return Reservation(self, nbytes)

    def give_back(self, nbytes: int) -> None:
        """Subtract bytes that were committed earlier and are gone."""
        with self._lock:
            self._used -= nbytes
            assert self._used >= 0, self._used

    def levels(self) -> tuple[int, int]:
        """Return bytes in use and bytes reserved, of one moment."""
        with self._lock:
            return self._used, self._reserved

    def is_scarce(self, nbytes: int, fraction: float) -> bool:
        """Whether less than `fraction` of the limit would be free after `nbytes` more bytes."""
        with self._lock:
            if self._limit is None:
                return False
            return self._limit - self._used - self._reserved - nbytes < fraction * self._limit

    def _change(self, nbytes: int) -> None:
        with self._lock:
            used, reserved, limit = self._used, self._reserved, self._limit
            fits = nbytes <= 0 or limit is None or used + reserved + nbytes <= limit
            if fits:
                self._reserved += nbytes
        if not fits:
            raise QuotaExceeded(
                f"{nbytes:,} more bytes do not fit in the disk quota of {limit:,} bytes for "
                f"{self._where}: {used:,} in use, {reserved:,} reserved by writes in progress. "
                "Release data, add workers, or raise the quota"
            )

    def _commit(self, nbytes: int) -> None:
        with self._lock:
            self._reserved -= nbytes
            self._used += nbytes


class Reservation:
    """Bytes promised to one writer; ends in exactly one of :meth:`commit` and :meth:`release`."""

    __slots__ = ("_nbytes", "_quota")

    def __init__(self, quota: Quota, nbytes: int) -> None:
        self._quota = quota
        self._nbytes = nbytes

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes` bytes from now on.

        Raises
        ------
        QuotaExceeded
            Growing is not possible; the reservation stays as it was.
        """
        self._quota._change(nbytes - self._nbytes)
        self._nbytes = nbytes

    def commit(self) -> None:
        """Turn the reservation into bytes in use; `Quota.give_back` ends that."""
        nbytes, self._nbytes = self._nbytes, 0
        self._quota._commit(nbytes)

    def release(self) -> None:
        """Give the bytes back. Does nothing after :meth:`commit` or when repeated."""
        nbytes, self._nbytes = self._nbytes, 0
        self._quota._change(-nbytes)


def _check(limit: int | None) -> None:
    if limit is not None and limit < 0:
        raise ValueError(f"quota must be None or at least 0 bytes, got {limit}")
