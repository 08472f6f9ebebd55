"""Threads for tests."""

import threading


def in_thread(function, *args):
    """Run a function in a thread; returns what waits for it and returns, or raises, what it did."""
    outcome = {}

    def run():
        try:
            outcome["value"] = function(*args)
        except Exception as error:
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(60)
        assert not thread.is_alive()
        if "error" in outcome:
            raise outcome["error"]
        return outcome.pop("value")

    return join
