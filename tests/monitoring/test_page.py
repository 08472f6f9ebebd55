"""The page of a run: complete, self-contained, and right in its figures."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from gpuspill.monitoring.advice import Run
from gpuspill.monitoring.chart import Series, chart, ticks
from gpuspill.monitoring.page import About, render
from gpuspill.monitoring.samples import ClusterSample
from tests.monitoring.cluster_samples import worker


class Checker(HTMLParser):
    """Collects texts; fails where an element is not closed."""

    VOID = frozenset({"meta", "line"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())


def checked(page: str) -> Checker:
    found = Checker()
    found.feed(page)
    assert found.open == []
    assert found.links == [], "the page refers to something else"
    return found


def samples(count: int) -> list[ClusterSample]:
    def numbers(i: int) -> dict[str, float | None]:
        return worker(
            limit=2**30,
            host_nbytes=2**29,
            spilled_nbytes=i * 2**24,
            written_nbytes=i * 2**24,
            spills=i,
            wait_seconds=i * 0.01,
        )

    return [
        ClusterSample(50.0 + i, {"tcp://a:1": numbers(i), "tcp://b:2": numbers(2 * i)}, i % 5, 0.02)
        for i in range(count)
    ]


def test_what_it_says():
    about = About("My run", {"gpuspill": "1.2.3"}, [(3.0, "tcp://a:1", "the disk <limit> is used up")])
    page = render(Run(samples(30)), about)
    texts = checked(page).texts
    assert texts.count("My run") == 2  # in the window's title, too
    assert "gpuspill 1.2.3" in texts
    assert "the disk <limit> is used up" in texts
    assert texts[texts.index("Written") + 1] == "1.36 GiB"  # 29 and 58 times 16 MiB
    assert texts[texts.index("Most on disk") + 1] == "1.36 GiB"
    assert texts[texts.index("Time") + 1] == "29.0 s"
    assert texts[texts.index("spilled_nbytes") + 1 :][:3] == ["1.36 GiB", "464 MiB", "928 MiB"]


def test_of_hundreds_of_workers_those_that_spilled_most_have_a_column():
    workers = {f"tcp://{i}:1": worker(spills=i, spilled_total_nbytes=i) for i in range(300)}
    texts = checked(
        render(Run([ClusterSample(0.0, dict.fromkeys(workers, worker())), ClusterSample(1.0, workers)]), About())
    ).texts
    assert [text for text in texts if text.startswith("tcp://")] == [f"tcp://{i}:1" for i in range(284, 300)]
    assert texts[texts.index("spills") + 1] == f"{sum(range(300)):,}"
    assert "Of 300 workers, the 16 that spilled most." in texts


@pytest.mark.parametrize("workers", [{}, {"tcp://a:1": worker()}])
def test_a_run_of_one_moment(workers):
    checked(render(Run([ClusterSample(1.0, workers)]), About()))


def test_a_worker_that_comes_and_one_that_goes():
    found = checked(
        render(
            Run(
                [
                    ClusterSample(0, {"tcp://a:1": worker(spills=5)}),
                    ClusterSample(1, {}),
                    ClusterSample(2, {"tcp://b:2": worker(spills=3)}),
                ]
            ),
            About(),
        )
    )
    assert "tcp://b:2" in found.texts


@pytest.mark.parametrize("most", [0, 0.003, 1, 7, 99.9, 1e6])
@pytest.mark.parametrize("binary", [False, True])
def test_an_axis_is_round_and_reaches_the_largest_value(most, binary):
    found = ticks(most, binary)
    assert found[0] == 0
    assert found[-1] >= most
    assert 2 <= len(found) <= 7
    if binary and most:
        assert math.log2(found[1]).is_integer()


def points(html: str, kind: str) -> list[list[tuple[float, float]]]:
    found = re.findall(rf'<{kind} class="[^"]*" points="([^"]*)"', html)
    return [[tuple(map(float, point.split(","))) for point in one.split()] for one in found]


def test_areas_stand_on_each_other():
    html = chart(
        "T",
        [0, 1],
        [Series("a", "host", [1, 1]), Series("b", "disk", [2, 2]), Series("l", "limitcolor", [3, 3], True)],
        str,
        stacked=True,
    )
    first, second = points(html, "polygon")
    (limit,) = points(html, "polyline")
    assert first[:2] == second[2:][::-1], "the second area does not begin where the first one ends"
    assert second[:2] == limit, "three bytes in two tiers are not where a limit of three is"
    assert "T" in checked(html).texts


def test_of_many_samples_peaks_are_kept():
    values = [0.0] * 5000
    values[1234] = 9.0
    (line,) = points(chart("T", list(map(float, range(5000))), [Series("a", "host", values)], str), "polyline")
    assert len(line) <= 600
    assert min(y for _, y in line) == pytest.approx(10.0, abs=20)
