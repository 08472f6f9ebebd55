"""A store that keeps each record twice, and reads the second copy if the first is gone.

Two directories on two disks survive the loss of one. The wrapper adds nothing but that to
the stores it is given.
"""

from collections.abc import Sequence

from gpuspill.errors import RecordLost
from gpuspill.storage.base import Allocate, Frame, Lend, Receipt, Store
from gpuspill.storage.wrappers import WrapperStore


class MirroredStore(WrapperStore):
    """Keeps two copies of each record.

    Parameters
    ----------
    store
        Where the first copy goes. Its receipts are the receipts of this store.
    mirror
        Where the second copy goes. Both are closed together with this store.
    """

    def __init__(self, store: Store, mirror: Store) -> None:
        super().__init__(store)
        self.mirror = mirror
        self._mirrored: dict[
            Receipt, Receipt
        ] = {}  # no lock: each use is one operation that Python makes atomic

    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """Write both copies, or none."""
        receipt = self.store.write(header, frames)
        try:
            self._mirrored[receipt] = self.mirror.write(header, frames)
        except BaseException:
            self.store.delete(receipt)
            raise
        return receipt

    def read(
        self,
        receipt: Receipt,
        allocate: Allocate | None = None,
        *,
        lend: Lend | None = None,
    ) -> tuple[bytes, list[memoryview]]:
        """Read the first copy that is intact."""
        try:
            return self.store.read(receipt, allocate, lend=lend)
        except RecordLost:
            second = self._mirrored.get(receipt)
            if second is None:
                raise
            return self.mirror.read(second, allocate, lend=lend)

    def delete(self, receipt: Receipt) -> None:
        """Delete both copies."""
        self.store.delete(receipt)
        second = self._mirrored.pop(receipt, None)
        if second is not None:
            self.mirror.delete(second)

    def close(self) -> None:
        """Close both stores."""
        try:
            self.store.close()
        finally:
            self.mirror.close()

    @property
    def inside(self) -> bool:
        """Whether this thread is in the middle of an operation of either."""
        return self.store.inside or self.mirror.inside

    def validate(self) -> None:
        """Check both stores."""
        self.store.validate()
        self.mirror.validate()
