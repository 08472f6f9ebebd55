"""Each statistic has a unit, a kind, a question and an explanation."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from gpuspill.manager.statistics import Statistics
from gpuspill.monitoring.catalogue import QUESTIONS, catalogue, explanations


def test_every_statistic_is_there_once_and_answers_a_question():
    names = [field.name for field in fields(Statistics)]
    assert sorted(catalogue()) == sorted(names)
    listed = [name for members in QUESTIONS.values() for name in members]
    assert sorted(listed) == sorted(names), "a statistic has no question, or several"
    assert {metric.question for metric in catalogue().values()} == set(QUESTIONS)


def test_units_and_kinds():
    known = catalogue()
    assert (known["limit"].unit, known["limit"].kind) == ("bytes", "gauge")
    assert (known["written_nbytes"].unit, known["written_nbytes"].kind) == ("bytes", "counter")
    assert (known["wait_seconds"].unit, known["wait_seconds"].kind) == ("seconds", "counter")
    assert (known["keys"].unit, known["keys"].kind) == ("count", "gauge")
    assert (known["lost"].unit, known["lost"].kind) == ("count", "counter")


def test_an_explanation_that_is_missing_or_left_over_is_found():
    @dataclass
    class Two:
        """Two.

        Attributes
        ----------
        first, third
            What it is,
            in two lines.
        """

        first: int
        second: int

    with pytest.raises(ValueError, match="'second', 'third'"):
        explanations(Two)


def test_what_is_explained_together_has_the_same_explanation():
    assert catalogue()["hits"].explanation == catalogue()["misses"].explanation
