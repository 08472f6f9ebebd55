"""What ``ci/gpu.sh`` found, as one document."""

import json

import pytest
from gpu_report import SECTIONS, main

XML = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_good" time="1.5"/>
<testcase classname="tests.a" name="test_left_out" time="0"><skipped message="no PyTorch"/></testcase>
{more}
</testsuite></testsuites>"""
BAD = '<testcase classname="tests.a" name="test_bad" time="0.25"><failure message="x"/></testcase>'


def write(folder, bad=()):
    for name in SECTIONS:
        (folder / f"{name}.xml").write_text(XML.format(more=BAD if name in bad else ""))
    (folder / "bandwidth.json").write_text('{"tier": {}}')


def test_every_section_is_told(tmp_path, capsys):
    write(tmp_path)
    assert main([str(tmp_path)]) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert list(found) == [*SECTIONS, "bandwidth"]
    assert found["cluster"] == {"tests": 2, "seconds": 1.5, "failed": [], "skipped": {"no PyTorch": 1}}
    assert found["bandwidth"] == {"tier": {}}
    assert "1 tests, 0 failed, 1 skipped" in capsys.readouterr().out


def test_what_failed_is_named_and_counts(tmp_path):
    write(tmp_path, bad=["libraries"])
    assert main([str(tmp_path)]) == 1
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["libraries"]["failed"] == ["tests.a::test_bad"]
    assert found["libraries"]["seconds"] == 1.75


@pytest.mark.parametrize("missing", ["cluster.xml", "bandwidth.json"])
def test_a_section_that_did_not_end_counts(tmp_path, missing, capsys):
    write(tmp_path)
    (tmp_path / missing).unlink()
    assert main([str(tmp_path)]) == 1
    assert "did not end" in capsys.readouterr().out
