"""The page ``/gpuspill``: what the live server gives to a browser, and what a browser makes of it."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from distributed import wait
from distributed.utils_test import gen_cluster
from tornado.httpclient import AsyncHTTPClient, HTTPClientError

import gpuspill
from gpuspill.distributed.dashboard import SchedulerSource, SpillingPage, WorkerSource
from gpuspill.monitoring.samples import ClusterSample
from tests.distributed.clusters import all_spilled, spilling
from tests.monitoring.cluster_samples import worker

pytest.importorskip("bokeh")
pytestmark = pytest.mark.cluster

#: Writes into the page what a person would see of it: Bokeh's elements are in shadow trees, which are not dumped.
LOOK = """
setTimeout(() => {
  const seen = {text: "", canvases: 0, bars: 0}
  const walk = (node) => {
    if (node.nodeType === 3) seen.text += " " + node.textContent
    if (node.tagName === "CANVAS") seen.canvases += 1
    if (["SCRIPT", "STYLE"].includes(node.tagName)) return
    if (node.shadowRoot) walk(node.shadowRoot)
    node.childNodes.forEach(walk)
  }
  walk(document.body)
  const views = [...Bokeh.index.roots]
  while (views.length) {
    const view = views.pop()
    if (view.glyph && view.glyph.model.type === "HBar") seen.bars += view.glyph.data_size
    views.push(...view.children())
  }
  const found = document.createElement("pre")
  found.id = "seen"
  found.textContent = JSON.stringify(seen)
  document.body.appendChild(found)
}, 3000)
"""

DASHBOARDS = {
    "scheduler_kwargs": {"dashboard": True, "dashboard_address": ":0"},
    "worker_kwargs": {"dashboard": True, "dashboard_address": ":0", "data": gpuspill.data()},
}


async def fetch(server, path: str) -> str:
    answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{server.http_server.port}{path}")
    return answer.body.decode()


async def shown(server) -> None:
    """Wait until a worker has its page: it gets it with the first turn of its periodic callback."""
    while not server._gpuspill._shown:
        await asyncio.sleep(0.01)


@spilling(limits=(1,), nthreads=[("", 1)], **DASHBOARDS)
async def test_pages_of_worker_and_scheduler(c, s, a):
    with pytest.raises(HTTPClientError, match="404"):
        await fetch(s, "/gpuspill")
    await c.register_plugin(gpuspill.MonitorPlugin())
    await c.register_plugin(gpuspill.MonitorPlugin())  # does nothing
    await shown(a)
    for server in (s, a):
        page = await fetch(server, "/gpuspill")
        assert "gpuspill" in page
        assert page.count('<a href="gpuspill">Gpuspill</a>') == 1, "the menu has no line, or two"
        assert 'href="gpuspill"' in await fetch(server, "/status")


@gen_cluster(client=True, nthreads=[("", 1)], scheduler_kwargs=DASHBOARDS["scheduler_kwargs"])
async def test_by_preload(c, s, a):
    await gpuspill.dask_setup(s)
    assert "gpuspill" in await fetch(s, "/gpuspill")
    assert not hasattr(a, "_gpuspill")


@gen_cluster(client=True, nthreads=[("", 1)], scheduler_kwargs={"dashboard": False})
async def test_a_scheduler_without_a_dashboard(c, s, a):
    await c.register_plugin(gpuspill.MonitorPlugin())


def texts(root) -> str:
    from bokeh.models import Div

    return " ".join(model.text for model in root.select({"type": Div}))


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1), ("127.0.0.1", 1)], **DASHBOARDS)
async def test_what_it_shows(c, s, a, b):
    xs = [
        c.submit(np.ones, 10_000 * (i + 1), key=f"x-{i}", workers=[server.address])
        for i, server in enumerate([a, b, a, b])
    ]
    await wait(xs)
    await all_spilled(a, b)
    await asyncio.gather(a.heartbeat(), b.heartbeat())
    page = SpillingPage(SchedulerSource(s))
    page.update()
    page.update()
    tiers = page._tiers.data
    assert list(tiers["worker"]) == sorted([a.address, b.address])
    by_worker = dict(zip(tiers["worker"], tiers["disk"], strict=True))
    assert by_worker[a.address] == pytest.approx(320_000, rel=0.01)
    assert by_worker[b.address] == pytest.approx(480_000, rel=0.01)
    assert list(page._keys.data["key"]) == ["x-3", "x-2", "x-1", "x-0"]
    assert page._keys.data["size"][0] == "312 KiB"
    assert "2 workers" in texts(page.root)
    assert "781 KiB" in texts(page.root)
    own = SpillingPage(WorkerSource(a))
    own.update()
    assert list(own._keys.data["key"]) == ["x-2", "x-0"]
    assert set(own._keys.data["where"]) == {"disk"}


@gen_cluster(client=True, nthreads=[])
async def test_an_empty_cluster(c, s):
    page = SpillingPage(SchedulerSource(s))
    page.update()
    assert "No worker has gpuspill attached" in texts(page.root)
    assert list(page._tiers.data["worker"]) == []


class ManyWorkers:
    """A cluster that does not exist: each of its workers writes 10 bytes between two looks."""

    title = "many"

    def __init__(self, workers: int) -> None:
        self.looks = self.listings = 0
        self.workers = workers
        self.missed: set[str] = set()

    def sample(self) -> ClusterSample:
        self.looks += 1
        numbers = {f"tcp://{i}:1": worker(host_nbytes=i, written_nbytes=10 * self.looks) for i in range(self.workers)}
        return ClusterSample(
            float(self.looks), {name: said for name, said in numbers.items() if name not in self.missed}
        )

    def largest(self):
        self.listings += 1
        return []

    def events(self):
        return []


def test_hundreds_of_workers():
    """The fullest have bars, all of them are in the sums, and keys are gone through now and then."""
    source = ManyWorkers(300)
    page = SpillingPage(source)
    for _ in range(8):
        page.update()
    assert list(page._tiers.data["worker"]) == sorted(f"tcp://{i}:1" for i in range(260, 300))
    assert "the 40 with most of 300" in page._tiers_shown.title.text
    assert list(page._speeds.data["written"]) == [3000] * 7
    assert source.listings == 2


def test_a_worker_that_is_missed_for_a_while_goes_on_from_there():
    source = ManyWorkers(2)
    page = SpillingPage(source)
    for missed in ((), ("tcp://1:1",), ("tcp://1:1",), ()):
        source.missed = set(missed)
        page.update()
    assert list(page._speeds.data["written"]) == [10, 10, 10 + 30]


@pytest.mark.slow
@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)], **DASHBOARDS)
async def test_in_a_browser(c, s, a, tmp_path):
    """A browser draws as many bars and rows as there are workers and keys."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no browser: ci/browser.sh installs one")
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    xs = [c.submit(np.ones, 10_000, key=f"x-{i}") for i in range(3)]
    await wait(xs)
    await all_spilled(a)
    await a.heartbeat()
    page = SpillingPage(SchedulerSource(s))
    page.update()
    path = tmp_path / "page.html"
    head, end, tail = file_html(page.root, INLINE, "page").rpartition("</body>")
    path.write_text(f"{head}<script>{LOOK}</script>{end}{tail}")
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    process = await asyncio.create_subprocess_exec(
        browser, *flags.split(), "--virtual-time-budget=8000", f"--user-data-dir={tmp_path}/profile", "--dump-dom",
        path.as_uri(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    written, _ = await asyncio.wait_for(process.communicate(), 50)
    seen = json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', written.decode(), re.DOTALL)[1]))
    assert "1 worker:" in seen["text"]
    assert all(f"x-{i}" in seen["text"] for i in range(3)), "the table of the largest values has no row of one"
    assert seen["canvases"] >= 4, "not every figure was drawn"
    assert seen["bars"] == 3, "of one worker there are three tiers"
