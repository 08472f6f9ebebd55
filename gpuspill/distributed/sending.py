"""Answering somebody who asks for values: without decoding what is on disk, and without holding the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from gpuspill.admission import Admission
from gpuspill.core.budget import Kind
from gpuspill.distributed.internals import forget_lost, recover
from gpuspill.distributed.serialization import FOREIGN_HEADER
from gpuspill.distributed.views import LostValue
from gpuspill.distributed.wire import Form, Window, wrap
from gpuspill.errors import DataLostError
from gpuspill.manager import ProxifyManager
from gpuspill.serialization import Encoded

if TYPE_CHECKING:
    from gpuspill.distributed.attachment import Attachment

__all__ = ["Parcel", "pack"]


class Parcel:
    """The answer to one request, and what has to be given back when it is written.

    Parameters
    ----------
    manager
        Where the values are.
    window
        Bounds what is read from disk for sending.

    Attributes
    ----------
    values
        What to send, by key.
    """

    def __init__(self, manager: ProxifyManager, window: Window) -> None:
        self._manager = manager
        self._window = window
        self._pins: Admission | None = None
        self._taken = 0
        self.values: dict[Any, Any] = {}

    async def fill(self, keys: Iterable[Any], form: Form) -> None:
        """Pin the values of `keys` and get ready what to send. After a failure or a cancellation, release it.

        Raises
        ------
        DataLostError
            One of them is lost.
        """
        keys = list(keys)
        self.values = await (self._bring(keys) if form == "value" else self._export(keys, form))

    async def _bring(self, keys: Collection[Any]) -> dict[Any, Any]:
        """Bring the values into memory."""
        self._pins = self._manager.admit(None, keys, kind=Kind.TRANSFER)
        source = self._manager.materialize_later(self._pins)
        try:
            return source.result() if source.done() else await asyncio.wrap_future(source)
        except BaseException:
            source.cancel()
            raise

    async def _export(self, keys: Collection[Any], form: Form) -> dict[Any, Any]:
        """Leave the values where they are."""
        manager = self._manager
        self._pins = manager.pin(keys)
        missing = manager.missing_nbytes(self._pins)
        if missing:
            await self._window.take(missing)
            self._taken = missing
        exported = await asyncio.wrap_future(manager.export(self._pins))
        values: dict[Any, Any] = {}
        for key, value in exported.items():
            if not isinstance(value, Encoded):
                values[key] = value
            elif value.header == FOREIGN_HEADER:
                # As distributed's own buffer wrote it, which nobody but its own reader understands.
                values.update(await self._decoded(key))
            else:
                values[key] = wrap(value, form, manager.kind_of(key) if key in manager else None)
        return values

    async def _decoded(self, key: Any) -> dict[Any, Any]:
        return await asyncio.wrap_future(self._manager.get_many([key], missing="omit"))

    def release(self) -> None:
        """It is written, or never will be. Idempotent."""
        self.values = {}
        if self._taken:
            self._window.give_back(self._taken)
            self._taken = 0
        if self._pins is not None:
            self._pins.release()


async def pack(
    worker: Any,
    attachment: Attachment,
    keys: Collection[Any],
    form: Form,
    substitute: Callable[[DataLostError], LostValue] | None,
) -> Parcel:
    """Get ready what is there of `keys`.

    A key that is lost is left out, and the scheduler has been told when this returns. If nothing can recompute it and
    there is a `substitute`, the receiver gets that in its place.
    """
    store = attachment.store
    lost: dict[Any, Any] = {}
    while True:
        parcel = Parcel(store.manager, attachment.window)
        try:
            await parcel.fill((key for key in keys if key in store and key not in lost), form)
            parcel.values |= lost
            if substitute is not None and store.has_lost_values:
                for key, value in parcel.values.items():
                    if isinstance(value, LostValue):
                        parcel.values[key] = substitute(value.error)
            return parcel
        except DataLostError as error:
            parcel.release()
            if await recover(worker, error.key):
                continue
            if substitute is not None:
                lost[error.key] = substitute(error)
            else:
                forget_lost(worker, error.key)
        except BaseException:
            parcel.release()
            raise
