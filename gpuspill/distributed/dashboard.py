"""The dashboard's page ``/gpuspill``, on workers and on the scheduler.

A worker gets it by itself where it has a dashboard. A scheduler gets it by :class:`MonitorPlugin`
(``client.register_plugin(gpuspill.MonitorPlugin())``) or by ``dask scheduler --preload gpuspill``:
that is the only thing for which a scheduler needs gpuspill.

Names of distributed's dashboard that are not documented stand here only;
``tests/distributed/test_dashboard.py`` says which one has gone.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import pi
from typing import TYPE_CHECKING, Any, Final, Protocol

from distributed.diagnostics.plugin import SchedulerPlugin

from gpuspill.distributed.observing import TOPIC, sample_of
from gpuspill.distributed.reporting import export_prefix, heartbeat
from gpuspill.monitoring import units
from gpuspill.monitoring.prometheus import collector, families
from gpuspill.monitoring.samples import ClusterSample, combined, fullest, rates, remembering

if TYPE_CHECKING:
    from gpuspill.distributed.mapping import SpillStore

__all__ = ["MonitorPlugin", "PageSource", "SchedulerSource", "SpillingPage", "WorkerSource", "add_page", "show_worker"]

#: Milliseconds between two looks at the numbers while a page is open.
_REFRESH: Final = 500
#: How many samples a page shows.
_KEPT: Final = 240
#: How many keys and events it lists.
_LISTED: Final = 12
#: The keys are gone through at each such turn only.
_TURNS: Final = 4
#: How many workers have a bar.
_BARS: Final = 40
#: More keys than this are not gone through for the largest ones, on the event loop.
_MANY_KEYS: Final = 50_000
_TOO_MANY: Final = (f"more than {_MANY_KEYS:,} keys: not listed", "", 0)

_DEVICE, _HOST, _DISK, _LIMIT = "#8a5cc7", "#0072b2", "#e69f00", "#444444"
_WRITTEN, _READ, _WAITING, _STALL = "#d55e00", "#009e73", "#d55e00", "#56b4e9"


class PageSource(Protocol):
    """Where a page takes its numbers from. Asked on the event loop, while the page is open."""

    title: str

    def sample(self) -> ClusterSample:
        """Return the numbers of now."""

    def largest(self) -> list[tuple[str, str, int]]:
        """Return the largest values: key, where it is, bytes."""

    def events(self) -> list[tuple[float, str, str]]:
        """Return the newest notices: seconds since the epoch, worker, message; the newest first."""


class SchedulerSource:
    """All workers of a cluster, as the scheduler knows them from their heartbeats."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.title = "Dask: gpuspill"

    def sample(self) -> ClusterSample:
        """Return what the workers said in their last heartbeats."""
        return sample_of(self._scheduler.identity(), time.time())

    def largest(self) -> list[tuple[str, str, int]]:
        """Return the largest values by their size, and the workers that have them."""
        tasks = self._scheduler.tasks
        if len(tasks) > _MANY_KEYS:
            return [_TOO_MANY]
        found = heapq.nlargest(_LISTED, tasks.values(), key=lambda task: task.nbytes if task.who_has else -1)
        return [
            (str(task.key), ", ".join(sorted(str(worker.name) for worker in task.who_has)), task.nbytes)
            for task in found
            if task.who_has
        ]

    def events(self) -> list[tuple[float, str, str]]:
        """Return what workers warned of."""
        newest = list(self._scheduler.get_events(TOPIC))[-_LISTED:]
        return [
            (when, str(message.get("worker", "")), str(message.get("message", ""))) for when, message in newest[::-1]
        ]


class WorkerSource:
    """One worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.title = "Dask worker: gpuspill"

    @property
    def _store(self) -> SpillStore:
        store: SpillStore = self._worker._gpuspill.store
        return store

    def sample(self) -> ClusterSample:
        """Return the numbers of the store now."""
        state = self._worker.state
        return ClusterSample(time.time(), {self._worker.address: heartbeat(self._store)}, len(state.executing))

    def largest(self) -> list[tuple[str, str, int]]:
        """Return the largest values, and whether they are in memory."""
        store = self._store
        if len(store) > _MANY_KEYS:
            return [_TOO_MANY]
        on_disk = set(store.disk)
        tasks = self._worker.state.tasks
        sized = ((tasks[key].get_nbytes(), key) for key in store if key in tasks)
        found = heapq.nlargest(_LISTED, sized, key=lambda item: item[0])
        return [(str(key), "disk" if key in on_disk else "memory", nbytes) for nbytes, key in found]

    def events(self) -> list[tuple[float, str, str]]:
        """Return nothing: notices are shown by the scheduler, which has those of all workers."""
        return []


class SpillingPage:
    """The stores: tiers against limits, what moves, who waits, what is large, events.

    Parameters
    ----------
    source
        Of the numbers.

    Attributes
    ----------
    root
        Bokeh's model of the page.

    Notes
    -----
    Used on the event loop. :meth:`update` is O(workers) and does no I/O: what was shown before is
    not made again. Now and then it is O(keys), unless there are very many.
    """

    def __init__(self, source: PageSource) -> None:
        from bokeh.layouts import column, row
        from bokeh.models import Div

        self._source = source
        self._before: ClusterSample | None = None
        self._turn = 0
        self._summary = Div(text="", sizing_mode="stretch_width")
        self._tiers, tiers = self._tiers_figure()
        self._speeds, speeds = self._lines("Disk I/O of all workers", {"written": _WRITTEN, "read": _READ}, binary=True)
        self._waits, waits = self._lines("Tasks and transfers waiting for room", {"waiting": _WAITING}, binary=False)
        self._stalls, stalls = self._lines("Event loop: longest interval (ms)", {"interval": _STALL}, binary=False)
        self._keys, keys = self._table("Largest values", {"key": "key", "where": "where it is", "size": "size"})
        self._events, events = self._table("Notices", {"time": "time", "worker": "worker", "message": "message"})
        wraps = {"flex-wrap": "wrap"}  # below each other in a narrow window
        self.root = column(
            self._summary,
            tiers,
            row(speeds, waits, stalls, sizing_mode="stretch_width", styles=wraps),
            row(keys, events, sizing_mode="stretch_width", styles=wraps),
            sizing_mode="stretch_width",
        )

    # -- what it is made of ------------------------------------------------------------------------

    def _tiers_figure(self) -> tuple[Any, Any]:
        from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
        from bokeh.models.tickers import AdaptiveTicker
        from bokeh.plotting import figure

        names = ("worker", "device", "host", "disk", "limit", "device_text", "host_text", "disk_text", "limit_text")
        data = ColumnDataSource({name: [] for name in names})
        shown: Any = figure(
            title="Where the values of each worker are",
            y_range=[],
            x_range=Range1d(0, 1),
            height=160,
            sizing_mode="stretch_width",
            tools="",
            toolbar_location=None,
        )
        shown.hbar_stack(
            ["device", "host", "disk"],
            y="worker",
            height=0.7,
            color=[_DEVICE, _HOST, _DISK],
            legend_label=["device", "host memory", "disk only"],
            source=data,
        )
        shown.scatter(
            x="limit",
            y="worker",
            marker="dash",
            angle=pi / 2,
            size=26,
            line_width=2,
            line_color=_LIMIT,
            source=data,
            legend_label="limit",
        )
        shown.add_tools(
            HoverTool(
                tooltips=[
                    ("worker", "@worker"),
                    ("on the device", "@device_text"),
                    ("in host memory", "@host_text"),
                    ("limit", "@limit_text"),
                    ("on disk only", "@disk_text"),
                ]
            )
        )
        shown.xaxis[0].ticker = AdaptiveTicker(base=1024, mantissas=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
        shown.xaxis[0].formatter = NumeralTickFormatter(format="0.[0] ib")
        shown.ygrid.visible = False
        shown.add_layout(shown.legend[0], "above")
        shown.legend[0].orientation = "horizontal"
        shown.legend[0].border_line_color = None
        shown.legend[0].location = "left"
        shown.legend[0].label_text_font_size = "12px"
        self._tiers_shown: Any = shown
        return data, shown

    def _lines(self, title: str, colors: dict[str, str], *, binary: bool) -> tuple[Any, Any]:
        from bokeh.models import ColumnDataSource, DataRange1d, NumeralTickFormatter
        from bokeh.models.tickers import AdaptiveTicker
        from bokeh.plotting import figure

        data = ColumnDataSource({"time": [], **{name: [] for name in colors}})
        shown: Any = figure(
            title=title,
            x_axis_type="datetime",
            y_range=DataRange1d(start=0, min_interval=1024 if binary else 1),
            height=220,
            min_width=300,
            sizing_mode="stretch_width",
            tools="",
            toolbar_location=None,
        )
        for name, color in colors.items():
            label = {"legend_label": name} if len(colors) > 1 else {}
            shown.line("time", name, source=data, color=color, line_width=2, **label)
        if len(colors) > 1:
            shown.legend[0].location = "top_left"
            shown.legend[0].background_fill_alpha = 0.6
        if binary:
            shown.yaxis[0].ticker = AdaptiveTicker(base=1024, mantissas=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
            shown.yaxis[0].formatter = NumeralTickFormatter(format="0.[0] ib")
            shown.yaxis[0].axis_label = "per second"
        return data, shown

    def _table(self, title: str, columns: dict[str, str]) -> tuple[Any, Any]:
        from bokeh.layouts import column
        from bokeh.models import ColumnDataSource, DataTable, Div, TableColumn

        data = ColumnDataSource({name: [] for name in columns})
        wide = {"key": 360, "message": 420, "time": 90, "size": 90}
        table = DataTable(
            source=data,
            columns=[
                TableColumn(field=name, title=heading, width=wide.get(name, 160)) for name, heading in columns.items()
            ],
            index_position=None,
            height=340,
            sizing_mode="stretch_width",
            sortable=False,
        )
        return data, column(Div(text=f"<b>{title}</b>"), table, sizing_mode="stretch_width", min_width=320)

    # -- what it shows -----------------------------------------------------------------------------

    def update(self) -> None:
        """Show the numbers of now."""
        now = self._source.sample()
        self._show_summary(now)
        self._show_tiers(now)
        self._show_lines(now)
        self._before = remembering(self._before, now)
        if self._turn % _TURNS == 0:
            self._keys.data = dict(zip(("key", "where", "size"), _columns(self._largest(), 3), strict=True))
        self._turn += 1
        events = [
            (time.strftime("%H:%M:%S", time.localtime(when)), who, text) for when, who, text in self._source.events()
        ]
        self._events.data = dict(zip(("time", "worker", "message"), _columns(events, 3), strict=True))

    def _largest(self) -> list[tuple[str, str, str]]:
        return [(key, where, units.nbytes(nbytes) if nbytes else "") for key, where, nbytes in self._source.largest()]

    def _show_summary(self, now: ClusterSample) -> None:
        if not now.workers:
            self._summary.text = (
                "<p>No worker has gpuspill attached. <code>client.register_plugin(gpuspill.SpillPlugin())</code> "
                "attaches it to running workers.</p>"
            )
            return
        total = combined(now.workers)

        def text(name: str) -> str:
            return units.nbytes(total[name] or 0)

        limit = f" of {text('limit')}" if total["limit"] else ""
        device = ""
        if total["device_limit"] or total["device_nbytes"]:
            device = f"<b>{text('device_nbytes')}</b> on devices, "
        if total["device_host_pinned_nbytes"]:
            used, pinned = text("device_host_pinned_used_nbytes"), text("device_host_pinned_nbytes")
            device += f"{used} of {pinned} pinned host memory in use, "
        lost = total["lost"] or 0
        wrong = f", <b>{units.count(lost)} lost</b>" if lost else ""
        overruns = total["overruns"] or 0
        self._summary.text = (
            f"<p>{len(now.workers)} worker{'' if len(now.workers) == 1 else 's'}: {device}"
            f"<b>{text('host_nbytes')}</b>{limit} in host memory, <b>{text('spilled_nbytes')}</b> on disk only. "
            f"Written so far: {text('written_nbytes')}, read: {text('read_nbytes')}. "
            f"Tasks waited for room: {units.duration(total['wait_seconds'] or 0)}; "
            f"overcommits: {units.count(overruns)}{wrong}.</p>"
        )

    def _show_tiers(self, now: ClusterSample) -> None:
        rows: dict[str, list[Any]] = {name: [] for name in self._tiers.data}
        addresses = fullest(now.workers, _BARS)
        for address in addresses:
            numbers = now.workers[address]
            rows["worker"].append(address)
            for tier, name in (("device", "device_nbytes"), ("host", "host_nbytes"), ("disk", "spilled_nbytes")):
                rows[tier].append(numbers.get(name) or 0)
                rows[f"{tier}_text"].append(units.nbytes(numbers.get(name) or 0))
            limit = numbers.get("limit")
            rows["limit"].append(float("nan") if limit is None else limit)
            rows["limit_text"].append("none" if limit is None else units.nbytes(limit))
        self._tiers.data = rows
        some = "" if len(addresses) == len(now.workers) else f" (the {len(addresses)} with most of {len(now.workers)})"
        self._tiers_shown.title.text = f"Where the values of each worker are{some}"
        self._tiers_shown.y_range.factors = rows["worker"][::-1]
        self._tiers_shown.height = 120 + 34 * max(1, len(addresses))
        ends = [
            device + host + disk for device, host, disk in zip(rows["device"], rows["host"], rows["disk"], strict=True)
        ]
        limits = [limit for limit in rows["limit"] if limit == limit]  # without those that are not numbers
        self._tiers_shown.x_range.end = 1.05 * max([*ends, *limits, 1])

    def _show_lines(self, now: ClusterSample) -> None:
        when = now.time * 1000
        if self._before is not None:
            found = rates(self._before, now).values()
            speeds = {name: [sum(numbers[f"{name}_nbytes"] for numbers in found)] for name in ("written", "read")}
            self._speeds.stream({"time": [when], **speeds}, _KEPT)
        waiting = sum(numbers.get("waiting") or 0 for numbers in now.workers.values())
        self._waits.stream({"time": [when], "waiting": [waiting]}, _KEPT)
        self._stalls.stream({"time": [when], "interval": [now.loop_interval * 1000]}, _KEPT)


def _columns(rows: list[tuple[str, str, str]], count: int) -> list[list[str]]:
    return [[row[index] for row in rows] for index in range(count)]


def _document(make: Callable[[Any], PageSource], server: Any, extra: dict[str, Any], doc: Any) -> None:
    """Fill a document of the dashboard; called by Bokeh for each browser."""
    from distributed.dashboard import components
    from jinja2 import Environment, PackageLoader

    source = make(server)
    page = SpillingPage(source)
    page.update()
    doc.title = source.title
    doc.add_root(page.root)
    doc.template = Environment(loader=PackageLoader("distributed", "http/templates")).get_template("simple.html")
    doc.template_variables.update(extra)
    components.add_periodic_callback(doc, page, _REFRESH)  # type: ignore[no-untyped-call]


def add_page(server: Any, make: Callable[[Any], PageSource], template_variables: dict[str, Any]) -> None:
    """Add the page to the dashboard of a worker or of a scheduler.

    Parameters
    ----------
    server
        The worker or the scheduler; its HTTP server is running.
    make
        ``make(server)`` gives the numbers of a page.
    template_variables
        What the templates of its dashboard get. Its menu gets a line.
    """
    from distributed.dashboard.core import BokehApplication
    from tornado.ioloop import IOLoop

    pages = template_variables["pages"]
    if "gpuspill" not in pages:
        pages.append("gpuspill")
    application = BokehApplication(  # type: ignore[no-untyped-call]
        {"/gpuspill": partial(_document, make)}, server, prefix="", template_variables=template_variables
    )
    server.http_application.add_application(application)
    application.initialize(IOLoop.current())
    application.start()


def show_worker(worker: Any) -> None:
    """Add the page to a worker's dashboard; do nothing if it has none."""
    dashboard = sys.modules.get("distributed.dashboard.worker")  # it was imported if this process shows one
    if dashboard is not None and hasattr(worker, "http_application") and worker._dashboard:
        add_page(worker, WorkerSource, dashboard.template_variables)


class MonitorPlugin(SchedulerPlugin):
    """Shows all stores on the scheduler: the page ``/gpuspill``, and for Prometheus.

    >>> client.register_plugin(gpuspill.MonitorPlugin())  # doctest: +SKIP

    Notes
    -----
    ``dask scheduler --preload gpuspill`` does the same. The scheduler needs gpuspill for it, and
    Bokeh or ``prometheus_client``, as for the rest of its dashboard; what is missing there is left
    out. Registering it again does nothing.
    """

    name = "gpuspill-monitor"
    idempotent = True

    def __init__(self) -> None:
        self._scheduler: Any = None

    async def start(self, scheduler: Any) -> None:
        """Add page and metrics; called by distributed on the scheduler's event loop."""
        self._scheduler = scheduler
        exporter = collector()
        if exporter is not None:
            exporter.add(scheduler, _scheduler_families)
        if not hasattr(scheduler, "http_application"):
            return
        try:
            from distributed.dashboard.scheduler import template_variables
        except ImportError:
            return  # no dashboard without Bokeh
        add_page(scheduler, SchedulerSource, template_variables(scheduler))

    async def close(self) -> None:
        """Stop exporting metrics."""
        exporter = collector()
        if exporter is not None and self._scheduler is not None:
            exporter.discard(self._scheduler)


def _scheduler_families(scheduler: Any) -> Iterator[Any]:
    workers = sample_of(scheduler.identity(), time.time()).workers
    return families(export_prefix("scheduler"), {"": combined(workers)}, None) if workers else iter(())
