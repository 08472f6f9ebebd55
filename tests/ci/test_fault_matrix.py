"""docs/faults.md is what the markers of the tests say."""

from __future__ import annotations

from pathlib import Path

import fault_matrix
import pytest
from fault_matrix import FAULTS, PAGE, STEPS, Shown, WrongMarker, cells, markers, page

SOURCE = """
import pytest

@pytest.mark.fault("disk full", on="host→disk", outcome="stays")
@pytest.mark.fault("disk full", on=("host→disk", "receive"), outcome="goes on")
def test_one(): ...

class TestMany:
    @pytest.mark.parametrize("x", [1])
    @pytest.mark.fault("disk full", on="host→disk", outcome="stays")
    async def test_two(self, x): ...

def test_three(): ...
"""


def said_by(tmp_path: Path, source: str) -> list[Shown]:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(source, encoding="utf-8")
    return markers(tmp_path)


def test_the_page_is_what_the_markers_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(markers()), "run python ci/fault_matrix.py"
    assert fault_matrix.main(["--check"]) == 0


def test_what_the_page_has_to_cover() -> None:
    assert len(FAULTS) >= 25
    assert list(STEPS) == [
        *("device→host", "host→disk", "disk→host", "host→device"),
        *("send", "receive", "release", "close"),
    ]
    for fault, steps in FAULTS.items():
        assert steps.split(), fault
        assert set(steps.split()) <= set(STEPS), fault
    assert {fault for (fault, _), found in cells(markers()).items() if found} == FAULTS.keys()


def test_each_outcome_has_its_tests(tmp_path: Path) -> None:
    shown = said_by(tmp_path, SOURCE)
    found = cells(shown)
    assert found["disk full", "host→disk"] == {
        "stays": ["tests/test_x.py::test_one", "tests/test_x.py::TestMany::test_two"],
        "goes on": ["tests/test_x.py::test_one"],
    }
    assert found["disk full", "receive"] == {"goes on": ["tests/test_x.py::test_one"]}
    assert found["record damaged", "send"] == {}
    assert ("record damaged", "release") not in found
    text = page(shown)
    assert "| disk full | · | stays<br>goes on | · | · | · | goes on | · | · |" in text
    assert "| record damaged | · | · | **?** | · | **?** | · | · | · |" in text
    assert (
        "| disk full | host→disk | stays | `tests/test_x.py::test_one`, `tests/test_x.py::TestMany::test_two` |" in text
    )


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('"rust", on="send", outcome="x"', "'rust' is not listed"),
        ('"disk full", on="send", outcome="x"', "not listed for the step 'send', but for host→disk receive"),
        ('"disk full", on="nowhere", outcome="x"', "'nowhere'"),
        ('"disk full", on="host→disk"', "KeyError"),
        ('"disk full", outcome="x"', "KeyError"),
        ('on="host→disk", outcome="x"', "expected fault"),
        ('"disk full", on="host→disk", outcome=""', "found pytest.mark.fault"),
        ('"disk full", on="host→disk", outcome="x", why="y"', "found pytest.mark.fault"),
        ('DISK_FULL, on="host→disk", outcome="x"', "with plain texts"),
    ],
)
def test_markers_that_say_nothing(tmp_path: Path, marker: str, message: str) -> None:
    with pytest.raises(WrongMarker, match=f"^tests/test_x.py::test_y: .*{message}"):
        said_by(tmp_path, f"@pytest.mark.fault({marker})\ndef test_y(): ...")


def test_a_page_that_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fault_matrix, "ROOT", tmp_path)
    monkeypatch.setattr(fault_matrix, "PAGE", tmp_path / "faults.md")
    assert fault_matrix.main(["--check"]) == 1
    assert fault_matrix.main([]) == 0
    assert fault_matrix.main(["--check"]) == 0
    (tmp_path / "faults.md").write_text("# Faults")
    assert fault_matrix.main(["--check"]) == 1
    assert "run python ci/fault_matrix.py" in capsys.readouterr().out
    assert fault_matrix.main(["what"]) == 2
