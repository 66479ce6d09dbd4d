"""Traces: three formats are read alike, bad rows are told by file and line, and changes keep what they promise."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.load.statistics import percentile
from rose.load.traces import (
    Trace,
    capped,
    fitted,
    limited,
    made_trace,
    read_trace,
    windowed,
    with_lengths_scaled,
    with_rate_scaled,
)

OURS = "arrival_s,prompt_tokens,output_tokens\n0.000,374,44\n4.315,396,109\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9955900,396,109\n"
)
AZURE_ZONED = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,374,44\n2024-05-10 00:00:04.324930+00:00,396,109\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [0, 1]}\n'
    '{"timestamp": 4315, "input_length": 396, "output_length": 109, "hash_ids": []}\n'
)
SHUFFLED = "\ufeffoutput_tokens,user,arrival_s,prompt_tokens\r\n109,x,4.315,396\r\n\r\n44,y,0,374\r\n"
FORMATS = {"ours": OURS, "azure": AZURE, "azure 2024": AZURE_ZONED, "mooncake": MOONCAKE, "shuffled": SHUFFLED}


@pytest.fixture
def written(tmp_path):
    def write(text, name="trace", *, zipped=False):
        data = text if isinstance(text, bytes) else text.encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if zipped else data)
        return path

    return write


@pytest.mark.parametrize("text", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_every_format_gives_the_same_trace(written, text, zipped):
    trace = read_trace(written(text, zipped=zipped))
    assert trace.name == "trace"
    assert trace.arrival_s == pytest.approx([0.0, 4.315])
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]


def test_a_row_of_zero_tokens_counts_as_one(written):
    trace = read_trace(written("arrival_s,prompt_tokens,output_tokens\n0,0,0\n"))
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([1], [1])


@pytest.mark.parametrize(
    "text, line, what",
    [
        (OURS + "x,1,1\n", 4, "arrival `x` is not a number"),
        (OURS + "nan,1,1\n", 4, "not a time"),
        (OURS + "-1,1,1\n", 4, "not a time"),
        (OURS + "1,1.5,1\n", 4, "`1.5` is not a whole number of tokens"),
        (OURS + "1,1,-2\n", 4, "-2 is not a possible number"),
        (OURS + "\n\n1,1\n", 6, "2 columns where the header has 3"),
        (AZURE + "yesterday,1,1\n", 4, "`yesterday` is not a date"),
        (AZURE + "2024-05-10 00:00:00+00:00,1,1\n", 4, "is not a date and time like the rows before"),
        (MOONCAKE + '{"timestamp": 1}\n', 3, "missing required field `input_length`"),
        (MOONCAKE + "not json\n", 3, "malformed"),
        ("minute,requests\n0,10\n", 1, "`minute,requests` is not the header of a trace"),
    ],
)
def test_a_bad_row_is_reported_by_file_and_line(written, text, line, what):
    path = written(text, "bad.csv")
    with pytest.raises(ConfigError, match=r"(?s)trace .*bad\.csv, line ") as told:
        read_trace(path)
    assert f"line {line}:" in told.value.what and what in told.value.what


@pytest.mark.parametrize(
    "data, what",
    [
        (b"", "has no requests"),
        (b"arrival_s,prompt_tokens,output_tokens\n", "has no requests"),
        (gzip.compress(OURS.encode(), mtime=0)[:-9], "cut off or not gzip"),
        (b"\x1f\x8bnothing", "cut off or not gzip"),
        (b"\x1f\x8bnothing at all", "cannot be read"),
        (b"arrival_s,\xff\xfe\n", "not text"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(written, data, what):
    with pytest.raises(ConfigError, match=what):
        read_trace(written(data))


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")


rows = st.lists(st.tuples(st.integers(0, 600_000), st.integers(0, 20_000), st.integers(0, 3_000)), min_size=1)


def trace_of(table) -> Trace:
    arrivals, prompts, outputs = (np.array(column, dtype=np.int64) for column in zip(*table))
    return made_trace("t", arrivals / 1000, prompts, outputs)


@given(rows, st.integers(2, 40_000))
def test_capped_fits_the_context_and_keeps_what_fits(table, context):
    trace = trace_of(table)
    cut = capped(trace, context)
    assert np.all(cut.prompt_tokens + cut.output_tokens <= context)
    assert np.all(cut.prompt_tokens >= 1) and np.all(cut.output_tokens >= 1)
    fits = trace.prompt_tokens + trace.output_tokens <= context
    assert np.array_equal(cut.prompt_tokens[fits], trace.prompt_tokens[fits])
    assert np.array_equal(cut.output_tokens[fits], trace.output_tokens[fits])


@given(rows, st.integers(64, 40_000))
def test_scaling_puts_the_p99_prompt_at_a_quarter_of_the_context(table, context):
    scaled = with_lengths_scaled(trace_of(table), context)
    assert abs(percentile(scaled.prompt_tokens, 99) - context / 4) <= 0.5
    again = with_lengths_scaled(scaled, context)
    assert np.array_equal(again.prompt_tokens, scaled.prompt_tokens)


@given(rows, st.floats(0, 700), st.floats(0.001, 700))
def test_a_window_holds_what_arrives_in_it(table, start_s, length_s):
    trace = trace_of(table)
    inside = [at_s for at_s in trace.arrival_s.tolist() if start_s <= at_s < start_s + length_s]
    if not inside:
        with pytest.raises(ConfigError, match="has no requests from"):
            windowed(trace, start_s, start_s + length_s)
        return
    cut = windowed(trace, start_s, start_s + length_s)
    assert cut.arrival_s == pytest.approx(np.array(inside) - start_s)


@given(rows, st.floats(0.01, 100))
def test_scaling_the_rate_changes_only_time(table, factor):
    trace = trace_of(table)
    fast = with_rate_scaled(trace, factor)
    assert fast.arrival_s * factor == pytest.approx(trace.arrival_s)
    assert np.array_equal(fast.prompt_tokens, trace.prompt_tokens)


def test_fitted_cuts_by_time_and_scales_by_the_whole_trace():
    trace = made_trace("t", np.arange(100.0), np.full(100, 1000), np.full(100, 100))
    sent = fitted(trace, 400, start_s=10, duration_s=5, rate_scale=2, requests=8)
    assert sent.arrival_s.tolist() == [second / 2 for second in range(8)]
    assert set(sent.prompt_tokens.tolist()) == {100} and set(sent.output_tokens.tolist()) == {10}
    assert [note.split(":")[0] for note in sent.notes] == [
        "lengths x 0.1",
        "window from 10 s to 20 s",
        "rate x 2",
        "the first 8 requests of 10",
    ]


def test_two_windows_of_one_trace_are_scaled_alike():
    prompts = np.where(np.arange(200) < 100, 10, 1000)
    trace = made_trace("t", np.arange(200.0), prompts, np.full(200, 50))
    first, second = fitted(trace, 400, duration_s=100), fitted(trace, 400, start_s=100)
    assert (first.prompt_tokens[0], second.prompt_tokens[0]) == (1, 100)


@pytest.mark.parametrize("lengths, prompt", [("shrink", 10), ("fit", 100), ("keep", 10)])
def test_short_lengths_grow_only_when_asked_to(lengths, prompt):
    trace = made_trace("t", np.zeros(3), np.full(3, 10), np.full(3, 1))
    assert fitted(trace, 400, lengths=lengths).prompt_tokens[0] == prompt


def test_a_trace_that_fits_gets_no_note():
    trace = made_trace("t", np.zeros(3), np.full(3, 10), np.full(3, 1))
    assert fitted(trace, 4000, duration_s=60, requests=3).notes == ()


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda trace: capped(trace, 1), "a context of 1 holds no request"),
        (lambda trace: with_rate_scaled(trace, 0), "cannot be scaled by 0"),
        (lambda trace: with_rate_scaled(trace, float("nan")), "cannot be scaled by nan"),
        (lambda trace: limited(trace, 0), "0 requests are none"),
        (lambda trace: fitted(trace, 100, rate_scale=-1, duration_s=1), "cannot be scaled by -1"),
    ],
)
def test_changes_that_make_no_sense_are_refused(change, what):
    with pytest.raises(ConfigError, match=what):
        change(made_trace("t", np.zeros(1), np.ones(1, dtype=int), np.ones(1, dtype=int)))


def test_facts_say_what_was_sent():
    facts = made_trace("t", np.array([2.0, 0.0, 4.0]), np.array([3, 1, 2]), np.array([1, 1, 4])).facts()
    assert (facts["requests"], facts["span_s"], facts["requests_per_s"]) == (3, 4.0, 0.5)
    assert facts["prompt_tokens"] == {"mean": 2.0, "p50": 2, "p99": 3, "max": 3}
