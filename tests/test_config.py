"""Every option, every form it may come in, every default, and what cannot be used."""

import itertools
import re
from collections import UserDict
from dataclasses import FrozenInstanceError, fields
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import dask.config
import pytest

from gpuspill.config import Settings, simulated_options
from gpuspill.errors import ConfigError

NAN, INF = float("nan"), float("inf")

OFF: list[Any] = [None, 0, 0.0, False, "", "none", "None", "NONE", "false", "False", "FALSE", "off", "Off", "no", "0"]
NO_BYTES = [*OFF, "0 B", "0 GiB", "0.0", "00"]
NBYTES: list[tuple[Any, int]] = [
    (1, 1),
    (123456789, 123456789),
    (1e9, 10**9),
    ("5", 5),
    ("1e3", 1000),
    ("2 GiB", 2 * 2**30),
    ("2GiB", 2 * 2**30),
    ("1.5 kB", 1500),
    ("10 MB", 10**7),
    (" 10 MB ", 10**7),
]
BAD_BYTES = ["lots", "5 apples", "-1", -1, -(10**9), "-2 GiB", True, "true", "yes", [], [1], {}, {"a": 1}, (1,),
             object(), NAN, INF, -INF, "inf", "nan", "1e400", 0.5, "0.2", b"5", 1j, Path("x")]  # fmt: skip

LIMIT = {
    "good": [("auto", "auto"), *((value, None) for value in NO_BYTES), *NBYTES],
    "bad": [*BAD_BYTES, "AUTOMATIC"],
}
SIZE = {"good": [*((value, 0) for value in NO_BYTES), *NBYTES], "bad": [*BAD_BYTES, "auto"]}
BAD_COUNTS = ["many", "1.5", 1.5, -1, "-1", True, "true", [], [1], {}, object(), NAN, INF, "inf", "9e999"]
COUNT = {
    "good": [(1, 1), (7, 7), (3.0, 3), ("4", 4), (" 5 ", 5)],
    "bad": [*BAD_COUNTS, 0, None, False, "off", ""],
}
COUNT_OR_NONE = {
    "good": [*COUNT["good"], *((value, 0) for value in OFF)],
    "bad": BAD_COUNTS,
}
SWITCH = {
    "good": [
        *((value, False) for value in OFF),
        *((value, True) for value in (True, 1, 1.0, "1", "true", "True", "TRUE", "on", "On", "yes", "Yes")),
    ],
    "bad": ["maybe", 2, -1, 0.5, [], [1], {}, object(), NAN, "auto", "truee"],
}
CODEC = {
    "good": [*((value, None) for value in OFF), ("auto", "auto"), ("lz4", "lz4"), ("ZSTD ", "zstd"), ("zlib", "zlib"),
             ("snappy", "snappy")],
    "bad": ["lz5", "gzip", 1, True, [], ["lz4"], {}, 1.5, b"lz4", object()],
}  # fmt: skip
DIRECTORY = {
    "good": [
        *((value, None) for value in OFF),
        ("/some/where", "/some/where"),
        (Path("/some/where"), "/some/where"),
        ("relative", "relative"),
    ],
    "bad": [1, True, [], ["/some/where"], {}, 1.5, b"/some/where", object()],
}
SECONDS = {
    "good": [
        *((value, 0.0) for value in OFF),
        ("0 s", 0.0),
        (1, 1.0),
        (0.25, 0.25),
        ("250 ms", 0.25),
        ("250ms", 0.25),
        ("2 minutes", 120.0),
        ("3", 3.0),
        (timedelta(milliseconds=250), 0.25),
    ],
    "bad": ["soon", "5 apples", -1, -0.5, "-1 s", timedelta(seconds=-1), True, "true", [], [1], {}, object(), NAN, INF,
            "inf s", "1e400 s", b"1 s"],
}  # fmt: skip

DEVICE = {
    "good": [*((value, None) for value in OFF), ("auto", "auto"), ("simulated", "simulated"), (" CUDA ", "cuda")],
    "bad": ["gpu", 1, True, [], {}, 1.5, object()],
}
GDS = {
    "good": [
        *((value, None) for value in OFF),
        (" Auto", "auto"),
        *((value, "on") for value in (True, 1, 1.0, "on", "TRUE", "yes", "1")),
    ],
    "bad": ["gds", "cuda", 2, -1, [], {}, 1.5, object()],
}
DEVICE_LIMIT = {
    "good": [("auto", "auto"), *((value, None) for value in NO_BYTES), (0.5, 0.5), ("20 GB", 20 * 10**9), (1024, 1024)],
    "bad": ["lots", "5 apples", -1, True, [], {}, object(), NAN, INF],
}
PINNED = {
    "good": [*((value, 0) for value in NO_BYTES), (0.5, 0.5), ("0.25", 0.25), ("20 GB", 20 * 10**9), (1024, 1024)],
    "bad": ["auto", *DEVICE_LIMIT["bad"]],
}
FENCE = {
    "good": [("device", "device"), (" Stream ", "stream")],
    "bad": ["event", "", None, True, 1, [], {}, object()],
}
STORE = {
    "good": [*((value, None) for value in OFF), (dict, dict), (" collections:UserDict ", UserDict)],
    "bad": ["files", ":name", "module:", 7, [], {}, 1.5, object()],
}

OPTIONS: dict[str, tuple[Any, dict[str, list[Any]]]] = {
    "host_limit": ("auto", LIMIT),
    "max_spill": ("auto", LIMIT),
    "spill_directory": (None, DIRECTORY),
    "compression": ("auto", CODEC),
    "spill_threads": (2, COUNT),
    "restore_threads": (2, COUNT),
    "prefetch": (4, COUNT_OR_NONE),
    "admission": (True, SWITCH),
    "clean_copies": (True, SWITCH),
    "buffer_pool": (128 * 2**20, SIZE),
    "follow_process_memory": (True, SWITCH),
    "spill_timeout": (60.0, SECONDS),
    "storage_delay": (0.0, SECONDS),
    "device": ("auto", DEVICE),
    "device_memory_limit": ("auto", DEVICE_LIMIT),
    "device_fence": ("stream", FENCE),
    "pinned_memory": (0.25, PINNED),
    "gds": (None, GDS),
    "store": (None, STORE),
    "eviction_policy": (None, STORE),
}


def same(value: Any, expected: Any) -> bool:
    """Equal and of one type: True is not 1."""
    return type(value) is type(expected) and value == expected


@pytest.fixture(autouse=True)
def nothing_configured():
    with dask.config.set({"gpuspill": None}):
        yield


def test_every_option_is_tested_and_has_its_default():
    assert {field.name: field.default for field in fields(Settings)} == {
        name: default for name, (default, _) in OPTIONS.items()
    }
    assert Settings.load() == Settings()


def test_every_option_is_documented():
    for name in OPTIONS:
        assert name in Settings.__doc__


@pytest.mark.parametrize("name", OPTIONS)
def test_good_values(name):
    for value, expected in OPTIONS[name][1]["good"]:
        found = getattr(Settings.load(**{name: value}), name)
        assert same(found, expected), f"{name}={value!r} became {found!r}"


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_values_name_the_option_and_the_value(name):
    option = f"gpuspill.{name.replace('_', '-')}: "
    for value in OPTIONS[name][1]["bad"]:
        with pytest.raises(ConfigError, match=re.escape(option) + ".*" + re.escape(repr(value))):
            pytest.fail(f"{name}={value!r} became {getattr(Settings.load(**{name: value}), name)!r}")
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_from_the_configuration(name):
    """With a hyphen or an underscore, and a keyword wins."""
    (good, expected), (other, wanted) = OPTIONS[name][1]["good"][-1], OPTIONS[name][1]["good"][0]
    for spelling in (name, name.replace("_", "-")):
        with dask.config.set({"gpuspill": {spelling: good}}):
            assert same(getattr(Settings.load(), name), expected)
            assert same(getattr(Settings.load(**{name: other}), name), wanted)
        with dask.config.set({"gpuspill": {spelling: OPTIONS[name][1]["bad"][0]}}):
            with pytest.raises(ConfigError, match=name.replace("_", "-")):
                Settings.load()
            assert same(getattr(Settings.load(**{name: good}), name), expected), "a keyword wins over a bad value too"


@pytest.mark.parametrize(
    ("variable", "text", "name", "expected"),
    [
        ("DASK_GPUSPILL__HOST_LIMIT", "2 GiB", "host_limit", 2 * 2**30),
        ("DASK_GPUSPILL__HOST_LIMIT", "2000000000", "host_limit", 2 * 10**9),
        ("DASK_GPUSPILL__HOST_LIMIT", "None", "host_limit", None),
        ("DASK_GPUSPILL__MAX_SPILL", "0", "max_spill", None),
        ("DASK_GPUSPILL__SPILL_DIRECTORY", "/some/where", "spill_directory", "/some/where"),
        ("DASK_GPUSPILL__COMPRESSION", "false", "compression", None),
        ("DASK_GPUSPILL__SPILL_THREADS", "3", "spill_threads", 3),
        ("DASK_GPUSPILL__PREFETCH", "off", "prefetch", 0),
        ("DASK_GPUSPILL__ADMISSION", "False", "admission", False),
        ("DASK_GPUSPILL__ADMISSION", "true", "admission", True),
        ("DASK_GPUSPILL__CLEAN_COPIES", "no", "clean_copies", False),
        ("DASK_GPUSPILL__STORAGE_DELAY", "250 ms", "storage_delay", 0.25),
    ],
)
def test_the_same_from_the_environment(variable, text, name, expected):
    with dask.config.set(dask.config.collect_env({variable: text})):
        assert same(getattr(Settings.load(), name), expected)


def test_unknown_options_are_refused_with_a_hint():
    with pytest.raises(ConfigError, match=r"gpuspill\.host-limt: no such option.*'host_limit'"):
        Settings.load(host_limt=1)
    with pytest.raises(ConfigError, match=r"gpuspill\.xyz: no such option.*buffer_pool"):
        Settings.load(xyz=1)
    with dask.config.set({"gpuspill": {"prefech": 1}}), pytest.raises(ConfigError, match="prefetch"):
        Settings.load()


@pytest.mark.parametrize("configured", [5, "text", ["host-limit"], True])
def test_a_configuration_that_is_no_mapping(configured):
    with dask.config.set({"gpuspill": configured}), pytest.raises(ConfigError, match="mapping"):
        Settings.load()


@pytest.mark.parametrize("configured", [None, {}])
def test_an_empty_configuration(configured):
    with dask.config.set({"gpuspill": configured}):
        assert Settings.load() == Settings()


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        ({"memory": "a lot"}, "gpuspill.simulated.memory: found 'a lot'"),
        ({"memory": -1}, "gpuspill.simulated.memory: found -1"),
        ({"bandwidth": -1}, "gpuspill.simulated.bandwidth: found -1"),
        ({"kernel-latency": "-1 s"}, "gpuspill.simulated.kernel-latency: found '-1 s'"),
        ({"checks": "perhaps"}, "gpuspill.simulated.checks: found 'perhaps'"),
        ({"latenzy": 1}, "gpuspill.simulated.latenzy: no such option. Did you mean 'latency'?"),
        ("1 GiB", "gpuspill.simulated: expected a mapping of options, found '1 GiB'"),
    ],
)
def test_the_options_of_the_simulated_device_are_checked_too(configured, message):
    with dask.config.set({"gpuspill": {"simulated": configured}}), pytest.raises(ConfigError, match=re.escape(message)):
        Settings.load(prefetch=1)


def test_good_options_of_the_simulated_device():
    configured = {"memory": "1 GiB", "bandwidth": None, "kernel-latency": "1 ms", "latency": 0, "checks": "off"}
    with dask.config.set({"gpuspill": {"simulated": configured}}):
        assert Settings.load() == Settings()
    assert simulated_options(configured) == {
        "memory": 2**30, "bandwidth": None, "kernel_latency": 0.001, "latency": 0.0, "checks": False,
    }  # fmt: skip


def test_settings_do_not_change():
    settings = Settings.load(prefetch=1)
    with pytest.raises(FrozenInstanceError):
        settings.prefetch = 2  # type: ignore[misc]
    assert hash(settings) == hash(Settings.load(prefetch="1"))


def test_all_options_at_once():
    """No option depends on another."""
    first = {name: tests["good"][-1][0] for name, (_, tests) in OPTIONS.items()}
    expected = {name: tests["good"][-1][1] for name, (_, tests) in OPTIONS.items()}
    settings = Settings.load(**first)
    assert {name: getattr(settings, name) for name in OPTIONS} == expected
    for one, other in itertools.pairwise(OPTIONS):
        settings = Settings.load(**{one: first[one], other: first[other]})
        assert same(getattr(settings, one), expected[one])
        assert same(getattr(settings, other), expected[other])


def test_numbers_of_other_libraries():
    np = pytest.importorskip("numpy")
    for value in (np.int64(5), np.float64(5.0), Decimal(5)):
        assert Settings.load(host_limit=value).host_limit == 5
        assert Settings.load(spill_threads=value).spill_threads == 5
    for name in OPTIONS:
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            Settings.load(**{name: np.array([1, 2])})


def test_a_directory_below_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Settings.load(spill_directory="~/spill").spill_directory == "/home/somebody/spill"


@pytest.mark.parametrize("limit", [1.5, "1.5", 2.25])
def test_more_than_all_of_a_device_is_no_size(limit):
    with pytest.raises(ConfigError, match=r"device.memory.limit"):
        Settings.load(device_memory_limit=limit)
