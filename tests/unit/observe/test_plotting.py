"""Plots: round axes, marks that stay in the frame, text that is escaped, XML that any viewer can read."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.observe.plotting import STYLE, Panel, decades, powers, round_up, steps, svg


def test_axes_have_round_numbers():
    assert steps(0, 15) == [0, 5, 10, 15]
    assert steps(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert steps(3, 3) == [3]
    assert powers(0.1, 1000) == [0.1, 1, 10, 100, 1000]
    assert (round_up(0), round_up(7.1), round_up(230)) == (1.0, 8.0, 300.0)


@given(st.floats(1e-6, 1e9), st.floats(1, 1e3))
def test_decades_hold_the_values_and_are_apart(low, factor):
    begin, end = decades(low, low * factor)
    assert begin <= low * (1 + 1e-9) and low * factor <= end * (1 + 1e-9) and end >= 10 * begin


@given(st.floats(1e-6, 1e9))
def test_a_rounded_limit_is_at_most_twice_the_value(value):
    assert value <= round_up(value) * (1 + 1e-9) and round_up(value) <= 2 * value * (1 + 1e-9)


@pytest.mark.parametrize("is_log", [False, True])
def test_a_value_out_of_range_stays_in_the_frame(is_log):
    panel = Panel((0, 1), (0.1, 1), 100, is_log=is_log)
    assert panel.up(-5) == panel.up(0.1) == panel.bottom and panel.up(5) == panel.up(1) == panel.top


def test_a_line_of_one_point_is_visible_and_a_line_of_none_is_not_drawn():
    panel = Panel((0, 1), (0, 1), 100)
    panel.line([], "x")
    assert panel.parts == []
    panel.line([(0.5, 0.5)], "x")
    assert panel.parts[0].count(",") == 2


def test_bars_of_no_value_are_not_drawn():
    panel = Panel((0, 3), (0, 2), 100)
    panel.bars([1.0, math.nan, 0.0], "x")
    assert panel.parts[0].count("M") == 1 and "v-50.0h" in panel.parts[0]


@pytest.mark.parametrize("style", [None, STYLE])
def test_every_mark_is_well_formed_and_escaped(style):
    panel = Panel((0, 10), (0, 10), 100)
    panel.levels(steps(0, 10), "<{:g}>".format)
    panel.times(steps(0, 10), "{:g}&".format)
    panel.line([(0, 1), (5, 2)], "a")
    panel.dots([(1, 1)], "a")
    panel.area([(0, 2), (5, 4)], [(0, 1), (5, 2)], "a")
    panel.bars([1, 2], "a")
    panel.block(1, 2, 0, 1, "a", "<block>")
    panel.budget(5, "<budget>")
    panel.mark(3, "<mark>")
    text = svg("<title>", 200, panel.parts, style=style)
    ElementTree.fromstring(text)
    assert "&lt;block&gt;" in text and "&lt;mark&gt;" in text and ("xmlns" in text) is (style is not None)
