"""The scripts in ci/ that make environments of their own: what can be told without making one."""

import subprocess
from pathlib import Path

import pytest
from dask_cuda_suite import ARMS, main

ROOT = Path(__file__).parents[2]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("script", sorted((ROOT / "ci").glob("*.sh")), ids=lambda path: path.name)
def test_every_script_can_be_read_by_the_shell(script: Path) -> None:
    assert run("bash", "-n", str(script)).stderr == ""
    assert script.stat().st_mode & 0o111


def test_a_wrong_use_is_told() -> None:
    done = run("ci/test_dask_cuda.sh", "--sources", ".")
    assert done.returncode == 2
    assert "usage: ci/test_dask_cuda.sh" in done.stderr
    done = run("ci/test_dask_cuda.sh", "--source")
    assert done.returncode == 2
    assert "--source needs a value" in done.stderr
    done = run("ci/nightly.sh", "elsewhere")
    assert done.returncode == 1
    assert "there is no arm 'elsewhere'" in done.stderr
    assert "elsewhere          FAILED" in done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A repository with a test of dask-cuda's in it."""
    root = tmp_path / "source"
    tests = root / "dask_cuda" / "tests"
    tests.mkdir(parents=True)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tests / "conftest.py").write_text("raise RuntimeError('asks the driver')\n")
    (tests / "test_some.py").write_text(
        "import os\n"
        "def test_free():\n"
        "    assert os.environ['DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC'] == '1'\n"
        "    assert 'DASK_OTHER' not in os.environ\n"
        "def test_needs_a_device():\n"
        "    assert False\n"
        "def test_differs():\n"
        "    assert os.environ.get('DASK_JIT_UNSPILL') is None\n"
    )
    git = ("git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "x")):
        assert run(*git, *words).returncode == 0
    return root


def test_dask_cudas_tests_that_need_no_device_are_compared(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DASK_OTHER", "1")
    monkeypatch.setattr("dask_cuda_suite.metadata.version", lambda name: "26.10.0")
    installed = False
    monkeypatch.setattr("dask_cuda_suite.find_spec", lambda name: object() if installed else None)
    words = ["--source", str(source), "--ref", "HEAD", "--output", str(tmp_path / "out")]
    assert main([*words, "--arms", "gpuspill"]) == 2
    assert "for arm gpuspill, gpuspill must be installed" in capsys.readouterr().err
    assert main([*words, "--arms", "stock"]) == 0
    assert "2 of 3 tests pass without a device" in capsys.readouterr().out
    installed = True
    assert main([*words, "--arms", "stock"]) == 2
    assert "gpuspill must not be installed" in capsys.readouterr().err
    assert main([*words, "--arms", "gpuspill"]) == 0
    assert main([*words, "--arms", ",".join(list(ARMS)[1:])]) == 1
    output = capsys.readouterr().out
    assert "test_differs: passed -> failed NOT EXPLAINED" in output
    assert "test_needs_a_device" not in output
    assert main(["--source", str(source), "--ref", "v0", "--output", str(tmp_path / "out")]) == 2
    assert "name a tag or commit that it has with --ref" in capsys.readouterr().err
