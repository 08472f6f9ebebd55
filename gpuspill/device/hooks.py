"""The chain of out-of-memory hooks of a device."""

from __future__ import annotations

import threading

from gpuspill.device.port import HookInstallation, OutOfMemoryHook

__all__ = ["HookChain", "Installation"]


class Installation(HookInstallation):
    """One hook's place in a chain."""

    __slots__ = ("_chain", "hook")

    def __init__(self, chain: HookChain, hook: OutOfMemoryHook) -> None:
        self._chain = chain
        self.hook = hook

    @property
    def installed(self) -> bool:
        """Whether the hook would be asked now."""
        return self in self._chain.installations() and self._chain.connected()

    def reinstall(self) -> None:
        """Install the hook again, as the newest, unless it is installed."""
        self._chain.add(self)

    def uninstall(self) -> None:
        """Take the hook out of the chain."""
        self._chain.remove(self)


class HookChain:
    """Hooks, asked from the oldest to the newest, as RMM's adaptors. Thread-safe.

    The chain of a device with an allocator of its own is always connected. A chain that hangs on
    another library's allocator overrides :meth:`connected`, :meth:`connect` and
    :meth:`disconnect`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._installations: tuple[Installation, ...] = ()
        self._active = threading.local()

    def connected(self) -> bool:
        """Whether the device asks this chain at all. Cheap."""
        return True

    def connect(self) -> None:
        """Make the device ask this chain, unless it does. Chain's lock held; never blocks."""

    def disconnect(self) -> None:
        """Make the device ask this empty chain no more. The chain's lock is held."""

    def installations(self) -> tuple[Installation, ...]:
        """Return what is installed now."""
        return self._installations

    def add(self, installation: Installation) -> None:
        """Put it at the end, unless it is in the chain."""
        with self._lock:
            if installation not in self._installations:
                self._installations = (*self._installations, installation)
            self.connect()

    def remove(self, installation: Installation) -> None:
        """Take it out, if it is in the chain."""
        with self._lock:
            self._installations = tuple(i for i in self._installations if i is not installation)
            if not self._installations:
                self.disconnect()

    def clear(self) -> None:
        """Drop all, as a library does that sets up its memory anew."""
        with self._lock:
            self._installations = ()
            self.disconnect()

    @property
    def asking(self) -> bool:
        """Whether the calling thread is inside a hook."""
        return getattr(self._active, "asking", False)

    def ask(self, nbytes: int, retries: int) -> bool:
        """Ask hooks in turn until one wants another try. No lock is held meanwhile.

        Returns
        -------
        bool
            Whether to try again. False at once if the calling thread is inside a hook already.
        """
        if self.asking:
            return False
        self._active.asking = True
        try:
            return any(installation.hook(nbytes, retries) for installation in self._installations)
        finally:
            self._active.asking = False
