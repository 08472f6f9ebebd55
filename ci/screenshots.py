"""Make the pictures of the documentation: the page of a report, and the page of the dashboard while a job runs.

ci/screenshots.sh runs it. It needs Chromium (ci/browser.sh installs it), and takes about a minute.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import dask.array as da
from dask.distributed import Client, LocalCluster

import gpuspill

PICTURES = Path(__file__).parents[1] / "docs" / "_static"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
    "--no-proxy-server --remote-debugging-port=0 --hide-scrollbars --force-color-profile=srgb"
)
#: The pictures are in the repository, and pages load them: those who change this look at what it costs.
MOST_NBYTES = 150_000


async def look(url: str, seconds: float) -> bytes:
    """Return a picture of the page that a browser shows, after so many seconds. `url` is of its DevTools."""
    from tornado.httpclient import AsyncHTTPClient
    from tornado.websocket import websocket_connect

    found = json.loads((await AsyncHTTPClient().fetch(f"{url}/json")).body)
    address = next(target["webSocketDebuggerUrl"] for target in found if target["type"] == "page")
    connection = await websocket_connect(address, max_message_size=2**26)
    await asyncio.sleep(seconds)
    await connection.write_message(json.dumps({"id": 1, "method": "Page.captureScreenshot"}))
    while (message := await connection.read_message()) is not None:
        answer = json.loads(message)
        if answer.get("id") == 1:
            connection.close()
            return base64.b64decode(answer["result"]["data"])
    sys.exit("error: the browser ended before it made a picture")


def picture(browser: str, url: str, name: str, width: int, height: int, seconds: float) -> None:
    """Take a picture of a page so many seconds after it was opened: a dashboard draws what it gets meanwhile."""
    path = PICTURES / name
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [browser, *FLAGS.split(), f"--user-data-dir={profile}", f"--window-size={width},{height}", url],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            told = Path(profile) / "DevToolsActivePort"
            while not told.exists() or "\n" not in told.read_text():
                if process.poll() is not None:
                    sys.exit(f"error: {browser} ended with status {process.returncode}")
                time.sleep(0.1)
            port = told.read_text().partition("\n")[0]
            path.write_bytes(asyncio.run(look(f"http://127.0.0.1:{port}", seconds)))
        finally:
            process.terminate()
            process.wait()
    nbytes = path.stat().st_size
    print(f"{path.name}: {nbytes:,} bytes")
    if nbytes > MOST_NBYTES:
        sys.exit(f"error: {path} has more than {MOST_NBYTES:,} bytes: make the window smaller")


def main(browser: str) -> None:
    """Run a job that does not fit until the dashboard's picture is taken, and report on it."""
    data = gpuspill.data(host_limit="48 MiB", storage_delay=0.05)
    with (
        tempfile.TemporaryDirectory() as scratch,
        LocalCluster(  # type: ignore[no-untyped-call]
            n_workers=2, threads_per_worker=2, data=data, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,  # type: ignore[no-untyped-call]
    ):
        client.register_plugin(gpuspill.MonitorPlugin())
        page = cluster.dashboard_link.rpartition("/")[0] + "/gpuspill"
        report = Path(scratch) / "run.html"
        taking = threading.Thread(target=picture, args=(browser, page, "dashboard.png", 1200, 940, 12))
        with gpuspill.report(report, client, title="Mean and variance of an array larger than memory"):
            x = da.random.random((6_000, 5_000), chunks=(200, 5_000)).persist()
            taking.start()
            while taking.is_alive():
                (x - x.mean(axis=0)).var().compute()
            taking.join()
        del x
        picture(browser, report.as_uri(), "report.png", 1000, 960, 2)


if __name__ == "__main__":
    main(sys.argv[1])
