"""Processes for tests."""

import os
import signal
import time


def in_child(function, forked=lambda: None):
    """Run a function in a forked child; AssertionError if it fails or hangs there, with what it raised.

    `forked` is called in the parent once the child is there.
    """
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        outcome = b""
        try:
            function()
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}".encode()[:4000]
        finally:
            os.write(write, outcome or b"well")
            os._exit(0)
    os.close(write)
    forked()
    deadline = time.monotonic() + 60
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        time.sleep(0.001)
    with open(read, "rb") as pipe:
        assert pipe.read().decode() == "well"
