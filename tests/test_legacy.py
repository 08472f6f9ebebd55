"""What becomes of the settings of JIT-unspill."""

from __future__ import annotations

import dask
import pytest

from gpuspill.config.jit_unspill import answer_once, answers, jit_unspill
from gpuspill.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "on"), [(None, None), (True, True), ("on", True), (1, True), (False, False), ("off", False), ("0", False)]
)
def test_the_switch(value: object, on: bool | None) -> None:
    with dask.config.set({"jit-unspill": value}):
        assert jit_unspill() is on


def test_the_switch_as_a_variable_gives_it() -> None:
    for text, on in (("True", True), ("off", False), ("1", True)):
        with dask.config.set(dask.config.collect_env({"DASK_JIT_UNSPILL": text})):
            assert jit_unspill() is on


def test_a_switch_that_is_neither() -> None:
    with dask.config.set({"jit_unspill": "maybe"}), pytest.raises(ConfigError, match=r"DASK_JIT_UNSPILL.*'maybe'"):
        jit_unspill()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jit-unspill-compatibility-mode", True),
        ("jit-unspill-shared-fs", False),
        ("spill-on-demand", True),
        ("spill-on-demand", "on"),
        ("gds-spilling", "off"),
        ("jit-unspill", True),
        ("gds-spilling", None),
    ],
)
def test_what_gpuspill_does_anyway_needs_no_answer(name: str, value: object) -> None:
    with dask.config.set({name: value}):
        assert answers() == []


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("jit-unspill-compatibility-mode", False, "plain objects, never proxies"),
        ("jit-unspill-incompatible", "cupy.ndarray", "no type needs an exception"),
        ("jit-unspill-ignore", "cupy.ndarray", "no type needs an exception"),
        ("jit-unspill-shared-fs", True, "gpuspill.spill-directory"),
        ("spill-on-demand", "off", "gpuspill.device-memory-limit"),
        ("gds-spilling", True, "gpuspill.gds"),
        ("gds-spilling", "perhaps", "gpuspill.gds"),
    ],
)
def test_every_other_setting_is_answered_by_what_replaces_it(name: str, value: object, instead: str) -> None:
    variable = "DASK_" + name.upper().replace("-", "_")
    by_variable = dask.config.collect_env({variable: str(value)})
    for config in ({name: value}, {name.replace("-", "_"): value}, by_variable):
        with dask.config.set(config):
            (answer,) = answers()
        assert answer.startswith(f"{name} ({variable}) = {value!r} is a setting of JIT-unspill and changes nothing: ")
        assert instead in answer


def test_an_answer_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    answer_once.cache_clear()
    for text in ("one", "one", "two"):
        answer_once(text)
    assert [record.getMessage() for record in caplog.records] == ["one", "two"]
