"""Step profiles: the formula, the files that ship, and how a wrong file is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rose.core.facts import StepFeatures
from rose.engines.profiles import StepProfile, load_profile, profile_names, write_profile
from rose.engines.roofline import H800, QWEN3_8B, SHIPPED, roofline
from rose.errors import ConfigError

ROUND = StepProfile(
    name="round",
    what="numbers one can add up in the head",
    shape="sum",
    fixed_s=1.0,
    per_new_token_s=0.1,
    per_kv_read_token_s=0.01,
    per_new_by_context_s=0.001,
    per_sequence_s=0.5,
    weights_read_s=2.0,
    per_new_token_exchange_s=0.2,
    kv_bytes_per_token=10,
    kv_memory_bytes=1000,
    block_tokens=4,
    max_context_tokens=64,
    source={"all": "made up"},
)
STEP = StepFeatures(new_tokens=10, kv_read_tokens=100, new_by_context=1000, sequences=2)


@pytest.mark.parametrize(
    "story, shape, features, seconds",
    [
        ("measured: everything adds up", "sum", STEP, 1 + 2 + (1 + 1 + 1) + (2 + 1)),
        ("roofline: compute hides behind memory", "roofline", STEP, 1 + 2 + max(3, 3)),
        ("roofline: compute-bound", "roofline", StepFeatures(100, 100, 1000, 2), 1 + 20 + 12),
        ("roofline: memory-bound", "roofline", StepFeatures(10, 900, 1000, 2), 1 + 2 + 11),
        ("nothing to do takes no time", "sum", StepFeatures(), 0),
    ],
)
def test_a_step_takes_what_the_constants_say(story: str, shape: str, features: StepFeatures, seconds: float) -> None:
    assert dataclasses.replace(ROUND, shape=shape).step_s(features) == pytest.approx(seconds), story


def test_memory_in_blocks() -> None:
    assert (ROUND.block_bytes, ROUND.kv_blocks) == (40, 25)


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_are_whole(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert all(profile.source.values())
    assert len(profile.source) >= 2
    decode = StepFeatures(1, 1000, 1000, 1)
    assert 0 < profile.step_s(decode) < profile.step_s(StepFeatures(2048, 2048, 2048 * 1024, 1))
    assert profile.kv_blocks * profile.block_tokens >= profile.max_context_tokens


def test_the_promised_profiles_ship() -> None:
    promised = {"cpu", "h800-qwen3-8b", "h800-qwen2.5-7b", "h800-qwen3-32b", "h800-qwen2.5-32b"}
    assert promised <= set(profile_names())


@pytest.mark.parametrize("model, tensor_parallel", SHIPPED)
def test_roofline_files_are_what_the_generator_makes(model, tensor_parallel) -> None:
    made = roofline(H800, model, tensor_parallel)
    assert load_profile(made.name) == made


def test_roofline_counts_the_model_right() -> None:
    assert QWEN3_8B.parameters == pytest.approx(8.19e9, rel=0.001)
    assert QWEN3_8B.kv_bytes_per_token == 147_456


def test_a_group_reads_faster_but_pays_for_exchange() -> None:
    alone, group = roofline(H800, QWEN3_8B, 1), roofline(H800, QWEN3_8B, 4)
    assert group.weights_read_s == pytest.approx(alone.weights_read_s / 4, rel=1e-5)
    assert group.fixed_s > alone.fixed_s
    assert group.per_new_token_exchange_s > alone.per_new_token_exchange_s == 0
    assert group.kv_memory_bytes > 4 * alone.kv_memory_bytes


def test_a_written_profile_is_read_back(tmp_path: Path) -> None:
    write_profile(ROUND, tmp_path / "mine.json")
    assert load_profile(tmp_path / "mine.json") == ROUND
    assert load_profile(str(tmp_path / "mine.json")) == ROUND


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h800-qwen3-8b'"):
        load_profile("h800-qwen3-8")


@pytest.mark.parametrize(
    "story, change, message",
    [
        ("a misspelt key", {"per_sequnce_s": 1.0}, "did you mean 'per_sequence_s'"),
        ("a wrong type", {"fixed_s": "fast"}, "not a step profile"),
        ("a negative cost", {"fixed_s": -1.0}, r"at `\$\.fixed_s`"),
        ("no memory", {"kv_memory_bytes": 1}, "does not hold one block"),
        ("no blocks", {"block_tokens": 0}, "does not hold one block"),
        ("an unknown shape", {"shape": "cone"}, "not a step profile"),
    ],
)
def test_a_bad_file_says_why(story: str, change: dict, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(dataclasses.asdict(ROUND) | change))
    with pytest.raises(ConfigError, match=message):
        load_profile(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_not_json_says_which_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.json is not a step profile"):
        load_profile(path)
