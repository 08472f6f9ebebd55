"""Slow files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed.spill import SpillBuffer

from gpuspill.bench.delay import DelayedFiles, delay_files


def test_only_what_touches_a_file_is_slowed_down() -> None:
    slept: list[float] = []
    files: dict[str, bytes] = {}
    slow = DelayedFiles(files, 0.25, sleep=slept.append)
    slow["a"] = b"1"
    assert files == {"a": b"1"}
    assert slow["a"] == b"1"
    del slow["a"]
    assert files == {}
    assert slept == [0.25] * 3
    slow["b"] = b"2"
    slept.clear()
    with pytest.raises(KeyError):
        slow["c"]
    with pytest.raises(KeyError):
        del slow["c"]
    assert "b" in slow
    assert "c" not in slow
    assert list(slow) == ["b"]
    assert len(slow) == 1
    assert slept == []


def test_a_spill_buffer_is_slowed_down_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = SpillBuffer(str(tmp_path), target=2**30)
    delay_files(buffer, 0.25)
    slept: list[float] = []
    files = buffer.slow.data.d  # type: ignore[attr-defined]
    monkeypatch.setattr(files, "_sleep", slept.append)
    buffer["a"] = bytes(1000)
    assert slept == []
    buffer.evict()
    assert slept == [0.25]
    assert buffer["a"] == bytes(1000)
    # Reading it back also deletes the file.
    assert slept == [0.25] * 3
    assert "a" in buffer.memory


def test_a_store_without_files_is_left_alone() -> None:
    data: dict[Any, Any] = {"a": 1}
    delay_files(data, 0.25)
    assert data == {"a": 1}
