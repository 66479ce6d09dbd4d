"""The gate of a rollout engine, with a board and a desk as real as they get, and a clock that the test moves."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from tests.unit.test_passive import DECODE, WORK, teach
from tests.unit.test_vllm_board import WRITE_ONE, about, start

from rose.core.facts import StepFeatures
from rose.core.passive import MilestoneKind
from rose.engines.vllm.board import BoardWriter
from rose.engines.vllm.desk import Control, Terms, control_sheet
from rose.engines.vllm.gate import Gate


class World:
    """A serving engine's board, an agent's desk and the gate between them."""

    def __init__(self, folder: Path, mode: str = "idle") -> None:
        self.now_s = 100.0
        self.path = folder / "serving.board"
        self.board = BoardWriter(self.path, about())
        self.agent = control_sheet(folder, create=True)
        self.gate = Gate(control_sheet(folder), step_tokens=256, sequences=16, now_s=lambda: self.now_s)
        self.terms = Terms(str(self.path), mode)  # type: ignore[arg-type]
        self.want()
        self.show()
        self.gate.attend()

    def want(self, **changes: object) -> None:
        plain = {"tokens": 1 << 20, "sequences": 1 << 20, "until_s": self.now_s + 5.0, "terms": self.terms}
        self.agent.write(Control(**{**plain, **changes}))  # type: ignore[arg-type]

    def show(self, waiting: tuple[float, ...] = (), running: tuple[float, ...] = ()) -> None:
        self.board.view(self.now_s, waiting, running, 0)

    def learn(self) -> None:
        """Both models, by what they would see."""
        for number in range(80):
            prompt = number % 2
            shape = StepFeatures(50 + number, 50, 2000, 1) if prompt else DECODE
            ended_s = self.now_s + 1e-3 + 1e-4 * shape.new_tokens
            self.board.step((self.now_s, ended_s, *dataclasses.astuple(shape)))
        self.gate.attend()
        teach(self.gate._rollout)

    def is_open(self) -> bool:
        return self.gate.ask(WORK).is_open(self.now_s)


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.learn()
    return made


def test_an_engine_that_nobody_speaks_for_is_closed(tmp_path: Path) -> None:
    control_sheet(tmp_path, create=True)
    gate = Gate(control_sheet(tmp_path), step_tokens=256, sequences=16)
    assert not gate.ask(WORK).is_open(0.0)
    assert "granted nothing" in gate.last_grant.reason


def test_the_gate_is_closed_until_serving_is_known(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert not world.is_open()
    assert "learning" in world.gate.last_grant.reason
    assert "0 steps seen" in world.gate.lent().missing
    world.learn()
    assert world.is_open()
    assert world.gate.lent().missing == ""


def test_it_opens_and_closes_with_serving(world: World) -> None:
    assert world.is_open()
    world.board.milestone(MilestoneKind.CAME, 1, world.now_s, tokens=30)
    assert not world.is_open(), "before any view tells of it"
    world.show(running=(world.now_s, 31, world.now_s))
    assert not world.is_open()
    world.show()
    assert world.is_open()


def test_decode_lends_beside_decoding_within_both_grants(tmp_path: Path) -> None:
    world = World(tmp_path, "decode")
    world.learn()
    world.show(running=(world.now_s, 31, world.now_s))
    grant = world.gate.ask(WORK)
    assert grant.is_open(world.now_s)
    world.want(tokens=3, sequences=2, until_s=world.now_s + 0.001)
    grant = world.gate.ask(WORK)
    assert (grant.tokens, grant.sequences) == (3, 2)
    assert grant.until_s <= world.now_s + 0.001


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"until_s": 1.0}, "is over"),
        ({"tokens": 0}, "is over"),
        ({"stopped": "paused by the owner"}, "paused by the owner"),
        ({"terms": Terms("/nowhere")}, "no board"),
    ],
)
def test_the_agents_word_closes_it(world: World, changes: dict[str, object], why: str) -> None:
    world.want(**changes)
    assert not world.is_open()
    assert why in world.gate.last_grant.reason
    world.want()
    assert world.gate.is_worth_asking()


def test_a_dead_agent_is_a_closed_gate(world: World) -> None:
    world.now_s += 5.1
    world.show()
    assert not world.is_open()
    assert world.gate.last_grant.reason == "the agent's grant is over"


def test_a_dead_serving_engine_is_a_closed_gate(world: World, tmp_path: Path) -> None:
    path = tmp_path / "other.board"
    process: subprocess.Popen[str] = start(WRITE_ONE, path)
    world.want(terms=Terms(str(path)))
    assert "learning" in world.gate.ask(WORK).reason, "another boot is another engine: nothing is known of it"
    process.kill()
    process.wait()
    assert world.gate.ask(WORK).reason == "the serving engine is gone"


def test_a_stale_or_silenced_board_is_a_closed_gate(tmp_path: Path) -> None:
    world = World(tmp_path, "decode")
    world.learn()
    world.show(running=(world.now_s, 31, world.now_s))
    assert world.is_open()
    world.now_s += 6.0
    world.want()
    assert "silent" in world.gate.ask(WORK).reason
    world.show()
    assert world.is_open()
    world.board.turn_off("RuntimeError: no")
    assert "RuntimeError: no" in world.gate.ask(WORK).reason


def test_new_terms_keep_what_was_learnt_of_the_same_engine(world: World) -> None:
    world.want(terms=Terms(str(world.path), "idle", ttft_s=2.0))
    assert world.is_open()


def test_without_terms_the_grant_is_all_there_is(world: World) -> None:
    world.want(terms=None, tokens=7, sequences=1)
    world.board.milestone(MilestoneKind.CAME, 1, world.now_s, tokens=30)
    grant = world.gate.ask(WORK)
    assert (grant.tokens, grant.sequences, grant.is_open(world.now_s)) == (7, 1, True)


def test_steps_are_accounted_for_and_rationed(world: World) -> None:
    world.want(compute_share=0.5)
    assert world.is_open()
    for _ in range(2):
        world.gate.began(DECODE, world.now_s)
        world.now_s += 0.2
        world.gate.ended()
    lent = world.gate.lent()
    assert (lent.steps, lent.tokens) == (2, 2 * DECODE.new_tokens)
    assert lent.seconds == pytest.approx(0.4)
    assert lent.breaches["step"] >= 1, "by the second the model has learnt that this device is slow"
    assert "50%" in world.gate.ask(WORK).reason
    world.now_s += 2.0
    world.show()
    assert world.is_open()


def test_a_dry_run_adds_up_and_runs_nothing(world: World) -> None:
    world.want(dry_run=True)
    assert not world.is_open()
    world.now_s += 1.0
    assert not world.is_open()
    lent = world.gate.lent()
    assert lent.dry_run_tokens > 0
    assert lent.dry_run_s == pytest.approx(1.0)


def test_the_owner_resumes_after_a_trip(world: World) -> None:
    for key in range(4):  # four first tokens that were late by what was lent in front of them
        world.gate.began(DECODE, world.now_s)
        world.board.milestone(MilestoneKind.CAME, key, world.now_s, tokens=30)
        world.now_s += 0.4
        world.gate.ended()
        world.now_s += 0.2
        world.board.milestone(MilestoneKind.FIRST_TOKEN, key, world.now_s)
        world.board.milestone(MilestoneKind.ENDED, key, world.now_s, tokens=1)
        world.show()
    world.want()
    assert "circuit breaker" in world.gate.ask(WORK).reason
    assert world.gate.lent().breaker_trips == 1
    world.want(resumes=1)
    assert world.is_open()


def test_a_glance_says_when_to_ask_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.learn()
    world.show(running=(world.now_s, 31, world.now_s))
    assert not world.is_open()
    assert not world.gate.is_worth_asking(), "in idle mode busy serving is no news"
    world.show()
    assert world.gate.is_worth_asking()
