"""``dask.array`` runs on the simulated device from end to end, and gives what it gives on NumPy, to the last bit."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpuspill import simulated
from gpuspill.device.port import OutOfMemory
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy

da = pytest.importorskip("dask.array")


@pytest.fixture
def device():
    with simulated.use(SimulatedDevice(1 << 22, clock=ManualClock())) as device:
        yield device
    if device.statistics().live_bytes:  # dask leaves cycles behind
        gc.collect()
    device.validate()
    statistics = device.statistics()
    assert statistics.live_bytes == 0
    assert statistics.violations == 0


@pytest.fixture
def hosts():
    """Two float arrays, one of integers, a square one; as dask arrays on the host."""
    random = np.random.default_rng(0)
    return (
        da.from_array(random.random((24, 20)), chunks=(10, 7)),
        da.from_array(random.random((24, 20)), chunks=(10, 7)),
        da.from_array(random.integers(0, 50, (24, 20)), chunks=(10, 7)),
        da.from_array(random.random((24, 24)), chunks=(7, 9)),
    )


def changed(x):
    x = x.copy()
    x[2:5] = 1.5
    x[x > 0.9] = 0
    return x


PIPELINES = {
    "elementwise": lambda x, y, i, s: np.exp(2 * x - 1) + np.float64(2) * y,
    "a + a.T": lambda x, y, i, s: s + s.T,
    "(a + a.T).mean": lambda x, y, i, s: (s + s.T).mean(axis=0),
    "zscore": lambda x, y, i, s: (x - x.mean(axis=0)) / x.std(axis=0),
    "sum": lambda x, y, i, s: x.sum(),
    "sum(axis, keepdims)": lambda x, y, i, s: x.sum(axis=1, keepdims=True),
    "sum(dtype)": lambda x, y, i, s: i.sum(dtype="i4"),
    "mean": lambda x, y, i, s: x.mean(),
    "mean of integers": lambda x, y, i, s: i.mean(axis=0),
    "std": lambda x, y, i, s: x.std(axis=1),
    "var(ddof)": lambda x, y, i, s: x.var(axis=0, ddof=1),
    "moment": lambda x, y, i, s: da.reductions.moment(x, 3),
    "max": lambda x, y, i, s: x.max(),
    "min": lambda x, y, i, s: x.min(axis=1),
    "prod": lambda x, y, i, s: x.prod(axis=0),
    "any": lambda x, y, i, s: (x > 0.9).any(axis=0),
    "all": lambda x, y, i, s: (x > 0.01).all(),
    "argmax": lambda x, y, i, s: x.argmax(axis=0),
    "argmin": lambda x, y, i, s: x.argmin(),
    "nanmean": lambda x, y, i, s: da.nanmean(da.where(x > 0.5, x, np.nan), axis=0),
    "nanstd": lambda x, y, i, s: da.nanstd(x),
    "cumsum": lambda x, y, i, s: x.cumsum(axis=0),
    "average": lambda x, y, i, s: da.average(x, axis=0, weights=y),
    "median": lambda x, y, i, s: da.median(x, axis=0),
    "percentile": lambda x, y, i, s: da.percentile(x[:, 0], [25, 50, 75]),
    "topk": lambda x, y, i, s: da.topk(x, 3, axis=0),
    "unique": lambda x, y, i, s: da.unique(i),
    "histogram": lambda x, y, i, s: da.histogram(x, bins=5, range=(0, 1))[0],
    "bincount": lambda x, y, i, s: da.bincount(i.ravel(), minlength=50),
    "cov": lambda x, y, i, s: da.cov(x),
    "count_nonzero": lambda x, y, i, s: da.count_nonzero(x > 0.5, axis=0),
    "dot": lambda x, y, i, s: x.T.dot(y),
    "matmul": lambda x, y, i, s: x.T @ y,
    "tensordot": lambda x, y, i, s: da.tensordot(x, y, axes=((0,), (0,))),
    "einsum": lambda x, y, i, s: da.einsum("ij,ij->i", x, y),
    "outer": lambda x, y, i, s: da.outer(x[:, 0], y[:, 0]),
    "norm": lambda x, y, i, s: da.linalg.norm(x),
    "svd": lambda x, y, i, s: da.linalg.svd(x.rechunk((12, -1)))[1],
    "fft": lambda x, y, i, s: da.fft.fft(x.rechunk((-1, 10)), axis=0),
    "concatenate": lambda x, y, i, s: da.concatenate([x, y], axis=1),
    "stack": lambda x, y, i, s: da.stack([x, y], axis=1),
    "block": lambda x, y, i, s: da.block([[x, y], [y, x]]),
    "slice": lambda x, y, i, s: x[2:20:3, ::-2],
    "newaxis": lambda x, y, i, s: x[:, None, 3],
    "list": lambda x, y, i, s: x[[1, 5, 3, 1]],
    "index array": lambda x, y, i, s: x[:, np.array([0, 7, 2])],
    "mask": lambda x, y, i, s: x[x > 0.5],
    "vindex": lambda x, y, i, s: x.vindex[[0, 1], [2, 3]],
    "take": lambda x, y, i, s: da.take(x, [1, 2], axis=1),
    "assign": lambda x, y, i, s: changed(x),
    "rechunk": lambda x, y, i, s: x.rechunk((5, 20)) + 1,
    "reshape": lambda x, y, i, s: x.reshape(-1) * 2,
    "roll": lambda x, y, i, s: da.roll(x, 3, axis=0),
    "repeat": lambda x, y, i, s: da.repeat(x, 2, axis=0),
    "pad": lambda x, y, i, s: da.pad(x, 2, mode="reflect"),
    "diff": lambda x, y, i, s: da.diff(x, axis=0),
    "gradient": lambda x, y, i, s: da.gradient(x, axis=0),
    "tril": lambda x, y, i, s: da.tril(s),
    "diag": lambda x, y, i, s: da.diag(x[:, 0]),
    "where": lambda x, y, i, s: da.where(x > 0.5, x, y),
    "where scalar": lambda x, y, i, s: da.where(x > 0.5, x, 0),
    "select": lambda x, y, i, s: da.select([x > 0.5, x > 0.2], [x, y], 0),
    "choose": lambda x, y, i, s: da.choose(i % 2, [x, y]),
    "astype": lambda x, y, i, s: (x * 10).astype("i4"),
    "clip": lambda x, y, i, s: x.clip(0.2, 0.8),
    "full_like": lambda x, y, i, s: da.full_like(x, 3.0),
    "zeros_like": lambda x, y, i, s: da.zeros_like(x) + 1,
    "empty_like": lambda x, y, i, s: da.empty_like(x).astype(bool) | True,
    "broadcast_to": lambda x, y, i, s: da.broadcast_to(x[0], (4, 20)) + 0,
    "map_blocks": lambda x, y, i, s: x.map_blocks(lambda block: block * 2),
    "map_overlap": lambda x, y, i, s: x.map_overlap(lambda block: block * 2, depth=1, boundary="reflect"),
    "apply_gufunc": lambda x, y, i, s: da.apply_gufunc(
        lambda block: block.mean(axis=-1), "(i)->()", x.rechunk((6, -1)), output_dtypes=float
    ),
    "coarsen": lambda x, y, i, s: da.coarsen(np.sum, x, {0: 2}),
    "integers": lambda x, y, i, s: (i & 3) | (i % 7),
    "complex": lambda x, y, i, s: da.angle((x + 1j * y).conj()),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_give_what_they_give_on_numpy(name, hosts, device):
    pipeline = PIPELINES[name]
    expected = pipeline(*hosts).compute(scheduler="sync")
    result = pipeline(*(x.map_blocks(asarray) for x in hosts)).compute(scheduler="sync")
    assert isinstance(result, simulated.Array)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(asnumpy(result), expected)


def test_the_way_back_is_a_step_of_the_graph(hosts, device):
    x = hosts[0].map_blocks(asarray)
    result = (x + 1).map_blocks(asnumpy).compute(scheduler="sync")
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, hosts[0].compute(scheduler="sync") + 1)


def test_conversion_by_dask(hosts, device):
    x = hosts[0].map_blocks(asarray)
    assert isinstance(x._meta, simulated.Array)
    result = x.to_backend("numpy")
    assert type(result._meta) is np.ndarray
    np.testing.assert_array_equal(result.compute(scheduler="sync"), hosts[0].compute(scheduler="sync"))


def test_threads_share_the_device(hosts):
    """Dask's threads have contexts of their own, so the process's default device is used."""
    x, y, _, _ = (x.map_blocks(asarray) for x in hosts)
    before = simulated.device().statistics()
    with ThreadPoolExecutor(4) as pool:
        result = ((x + y) @ (x - y).T).sum(axis=0).compute(scheduler="threads", pool=pool)
    expected = ((hosts[0] + hosts[1]) @ (hosts[0] - hosts[1]).T).sum(axis=0).compute(scheduler="sync")
    np.testing.assert_array_equal(asnumpy(result), expected)
    del result, x, y
    gc.collect()
    after = simulated.device().statistics()
    assert after.live_bytes == before.live_bytes
    assert after.violations == before.violations


def test_a_pipeline_larger_than_the_device_runs_out_of_memory(hosts):
    with simulated.use(SimulatedDevice(1000)):
        x = hosts[0].map_blocks(asarray)
        with pytest.raises(OutOfMemory):
            x.persist(scheduler="sync")


def test_chunks_mix_with_dask_arrays(hosts, device):
    chunk, expected = asarray(np.ones(20)), np.ones(20)
    for result in (hosts[0].map_blocks(asarray) * chunk, chunk * hosts[0].map_blocks(asarray)):
        assert isinstance(result, da.Array)
        np.testing.assert_array_equal(
            asnumpy(result.compute(scheduler="sync")), hosts[0].compute(scheduler="sync") * expected
        )


def test_size_and_token(device):
    from dask.sizeof import sizeof
    from dask.tokenize import tokenize

    array = asarray(np.arange(1000.0))
    assert sizeof(array) == 8000
    assert tokenize(array) == tokenize(asarray(np.arange(1000.0)))
    assert tokenize(array) != tokenize(array + 1)
    assert tokenize(array) != tokenize(asnumpy(array))


def test_registering_again_changes_nothing(hosts, device):
    from gpuspill.simulated.arrays.dispatch import register

    register()
    result = hosts[0].map_blocks(asarray).sum().compute(scheduler="sync")
    assert float(result) == hosts[0].sum().compute(scheduler="sync")
