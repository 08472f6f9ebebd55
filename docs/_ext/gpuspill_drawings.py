"""The drawings of "How it works", as SVG that takes its colours from the page.

Narrow enough to be read on a phone. A text that would not fit into its box is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

__all__ = ["DRAWINGS", "Canvas"]

WIDTH = 460

#: Of a character, at most, by the size of the font.
_ASPECT = 0.56


class Canvas:
    """An SVG drawing.

    Parameters
    ----------
    height
        In user units; the width is always the same.
    title
        For those who do not see it.
    """

    def __init__(self, height: int, title: str) -> None:
        self._parts = [
            f'<svg class="gpuspill-svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" '
            'xmlns="http://www.w3.org/2000/svg">',
            '<defs><marker id="gpuspill-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" class="head"/></marker></defs>',
        ]

    def text(self, x: float, y: float, words: str, *, kind: str = "", anchor: str = "middle") -> None:
        """Write one line; `y` is its middle."""
        self._parts.append(
            f'<text x="{x:g}" y="{y + 4:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, title: str, *lines: str, kind: str = "plain"
    ) -> None:
        """Draw a box with a title, and smaller lines below it.

        Raises
        ------
        ValueError
            A line is too wide, or there are too many.
        """
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}"/>')
        rows = [(title, 13, "title"), *((line, 11, "small") for line in lines)]
        needed = 17 * len(rows)
        for words, size, _ in rows:
            if len(words) * size * _ASPECT > width - 6:
                raise ValueError(f"{words!r} does not fit into {width}")
        if needed > height:
            raise ValueError(f"{len(rows)} lines do not fit into {height}")
        top = y + (height - needed) / 2 + 8.5
        for number, (words, _, style) in enumerate(rows):
            self.text(x + width / 2, top + 17 * number, words, kind=style)

    def arrow(self, *points: tuple[float, float], kind: str = "arrow") -> None:
        """Draw a line through points, with a head at its end."""
        path = " L".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<path d="M{path}" class="{kind}" marker-end="url(#gpuspill-head)"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> None:
        """Draw a line."""
        self._parts.append(f'<path d="M{x1:g},{y1:g} L{x2:g},{y2:g}" class="{kind}"/>')

    def done(self) -> str:
        """Return the drawing."""
        return "".join([*self._parts, "</svg>"])


def tiers() -> str:
    """Return the three tiers and the moves between them."""
    canvas = Canvas(404, "Three tiers: device, host and disk, with moves between them")
    canvas.box(90, 10, 280, 62, "Device memory", "arrays, by allocation", "limit: device-memory-limit", kind="device")
    canvas.box(
        90, 160, 280, 62, "Host memory", "plain objects; bytes that left the device", "limit: host-limit", kind="host"
    )
    canvas.box(90, 310, 280, 62, "Disk", "records, each with a checksum", "limit: max-spill", kind="disk")
    for top, down, up in (
        (72, "spill: copied, then freed", "restore"),
        (222, "spill: written, then freed", "restore: read, checked"),
    ):
        canvas.arrow((200, top + 4), (200, top + 84))
        canvas.arrow((260, top + 84), (260, top + 4))
        canvas.text(192, top + 44, down, kind="small", anchor="end")
        canvas.text(268, top + 44, up, kind="small", anchor="start")
    canvas.arrow((370, 41), (432, 41), (432, 341), (374, 341), kind="arrow dashed")
    canvas.text(424, 106, "host full:", kind="small", anchor="end")
    canvas.text(424, 122, "in pieces", kind="small", anchor="end")
    canvas.text(230, 392, "The event loop takes part in none of these moves.", kind="small")
    return canvas.done()


def task() -> str:
    """Return the way of a task, by thread."""
    canvas = Canvas(500, "The way of a task through the worker's event loop, its own thread and the spill threads")
    lanes = ((0, "event loop"), (154, "the task's thread"), (308, "spill threads"))
    for x, name in lanes:
        canvas.box(x + 2, 4, 148, 28, name, kind="lane")
        canvas.line(x + 76, 32, x + 76, 494, "lane-line")
    canvas.box(8, 50, 136, 44, "task is ready", "its inputs are known", kind="host")
    canvas.box(162, 112, 136, 60, "reserve room", "for missing inputs", "and the output", kind="device")
    canvas.box(162, 204, 136, 44, "pin inputs", "they stay in memory", kind="device")
    canvas.box(162, 270, 136, 44, "read the missing", "checked, decoded", kind="disk")
    canvas.box(162, 336, 136, 44, "your function", "plain objects", kind="plain")
    canvas.box(8, 408, 136, 60, "store the result", "unpin the inputs,", "tell the scheduler", kind="host")
    canvas.box(316, 112, 136, 60, "make room", "write what is", "needed last", kind="disk")
    canvas.box(316, 408, 136, 60, "over the limit?", "write in the", "background", kind="disk")
    canvas.arrow((144, 72), (230, 72), (230, 110))
    canvas.arrow((298, 134), (314, 134))
    canvas.arrow((316, 152), (300, 152))
    canvas.text(230, 182, "waits here, not on the loop", kind="small")
    canvas.arrow((230, 190), (230, 202))
    canvas.arrow((230, 248), (230, 268))
    canvas.arrow((230, 314), (230, 334))
    canvas.arrow((230, 380), (230, 438), (146, 438))
    canvas.arrow((76, 468), (76, 484), (384, 484), (384, 470))
    return canvas.done()


def admission() -> str:
    """Return what is compared with the limit, and what follows."""
    canvas = Canvas(330, "Admission: what counts against the limit, and when a task waits")
    canvas.text(8, 14, "host-limit", kind="small", anchor="start")
    canvas.box(8, 26, 190, 34, "used", kind="host")
    canvas.box(198, 26, 90, 34, "reserved", kind="device")
    canvas.box(288, 26, 76, 34, "offset", kind="disk")
    canvas.box(364, 26, 88, 34, "free", kind="free")
    canvas.text(103, 72, "values in memory", kind="small")
    canvas.text(236, 72, "promised", kind="small")
    canvas.text(330, 72, "process memory", kind="small")
    canvas.box(130, 100, 200, 44, "a task asks for room", "missing inputs + output", kind="plain")
    canvas.box(4, 200, 138, 44, "it fits", "run now", kind="host")
    canvas.box(152, 200, 156, 44, "something can leave", "wait for that spill", kind="device")
    canvas.box(318, 200, 138, 44, "nothing can leave", "run anyway", kind="disk")
    canvas.arrow((180, 144), (180, 172), (73, 172), (73, 198))
    canvas.arrow((230, 144), (230, 198))
    canvas.arrow((280, 144), (280, 172), (387, 172), (387, 198))
    canvas.text(242, 266, "waits, wait_seconds", kind="code")
    canvas.text(387, 266, "overruns", kind="code")
    canvas.arrow((165, 244), (165, 290), (73, 290), (73, 246), kind="arrow dashed")
    canvas.text(119, 306, "room came", kind="small")
    return canvas.done()


def streams() -> str:
    """Return copies in both directions beside computing, as a time line."""
    canvas = Canvas(290, "Copies to the host and to the device run on streams of their own, beside computing")
    rows = ((16, "compute"), (86, "to the host"), (156, "to the device"))
    for y, name in rows:
        canvas.text(4, y + 20, name, kind="small", anchor="start")
        canvas.line(88, y + 44, 456, y + 44, "lane-line")
    for number, x in enumerate((92, 228, 364)):
        canvas.box(x, 18, 92, 38, f"kernel {number + 1}", kind="device")
    for x, name in ((228, "spill A"), (364, "spill B")):
        canvas.box(x, 88, 92, 38, name, kind="disk")
    for x, name in ((92, "restore C"), (228, "restore D")):
        canvas.box(x, 158, 92, 38, name, kind="host")
    for x in (92, 228):  # what the kernel wrote is spilled; what was restored is read by the next kernel
        canvas.arrow((x + 76, 56), (x + 76, 72), (x + 182, 72), (x + 182, 86), kind="arrow dashed")
        canvas.arrow((x + 92, 177), (x + 114, 177), (x + 114, 37), (x + 134, 37), kind="arrow dashed")
    canvas.line(88, 216, 452, 216)
    canvas.arrow((440, 216), (456, 216))
    canvas.text(270, 230, "time", kind="small")
    canvas.text(230, 252, "Events (dashed) order a spill after the kernel, a kernel after the restore.", kind="small")
    canvas.text(230, 270, "Memory is freed only after the event of its copy was observed.", kind="small")
    return canvas.done()


DRAWINGS: Mapping[str, Callable[[], str]] = {
    "tiers": tiers,
    "task": task,
    "admission": admission,
    "streams": streams,
}
