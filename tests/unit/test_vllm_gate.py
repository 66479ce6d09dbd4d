"""The gate of a rollout engine, with a board and a desk as real as they get, and a clock that the test moves."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from tests.unit.test_passive import DECODE, WORK, teach
from tests.unit.test_vllm_board import WRITE_ONE, about, start

from rose.core.facts import RolloutView, StepFeatures
from rose.core.passive import MilestoneKind
from rose.engines.vllm.board import BoardWriter
from rose.engines.vllm.desk import Control, Terms, control_sheet
from rose.engines.vllm.gate import Gate


class World:
    """A serving engine's board, an agent's desk and the gate between them."""

    def __init__(self, folder: Path, mode: str = "idle") -> None:
        self.now_s, self.stalled_s = 100.0, 0.0
        self.path = folder / "serving.board"
        self.board = BoardWriter(self.path, about())
        self.agent = control_sheet(folder, create=True)
        clocks = {"now_s": lambda: self.now_s, "stalled_s": lambda: self.stalled_s}
        self.gate = Gate(control_sheet(folder), step_tokens=256, sequences=16, **clocks)  # type: ignore[arg-type]
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
        """Both models, by what they would see; serving's steps were long ago and no load now."""
        for number in range(80):
            prompt, began_s = number % 2, self.now_s - 90.0 + number
            shape = StepFeatures(50 + number, 50, 2000, 1) if prompt else DECODE
            ended_s = began_s + 1e-3 + 1e-4 * shape.new_tokens
            self.board.step((began_s, ended_s, *dataclasses.astuple(shape)))
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
    assert world.gate.has_word and world.gate.wait_for_word(60.0)


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
    learner = world.gate._beside.lending.serving
    seen = learner.seen
    world.want(terms=Terms(str(world.path), "idle", ttft_s=2.0))
    assert world.is_open()
    assert (world.gate._beside.lending.serving, learner.seen) == (learner, seen), "nor is anything learnt twice"


def test_a_fresh_engine_learns_from_what_the_board_still_shows(world: World, tmp_path: Path) -> None:
    fresh = Gate(control_sheet(tmp_path), step_tokens=256, sequences=16, now_s=lambda: world.now_s)
    fresh.attend()
    assert fresh.lent().missing == ""


def test_steps_that_ours_may_have_slowed_are_not_learnt_as_servings_own(world: World) -> None:
    """On no terms nobody sees what runs beside."""
    world.want(terms=None)
    world.gate.obey()
    seen = world.gate._rollout.seen
    run(world, DECODE)
    assert world.gate._rollout.seen == seen, "nor as ours"
    world.board.milestone(MilestoneKind.CAME, 1, world.now_s, tokens=30)
    world.want()
    world.gate.attend()
    assert "0 steps seen" in world.gate.lent().missing
    world.learn()
    assert world.gate.lent().missing == ""
    assert "has work" in world.gate.ask(WORK).reason, "who came before is known to wait"


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


def test_time_in_which_others_had_the_core_is_not_the_steps(world: World) -> None:
    """A busy machine must not teach that steps are long: whoever is kept from running holds nothing."""
    before_s = world.gate._rollout.model.upper(DECODE)
    for _ in range(20):
        assert world.is_open()
        world.gate.began(DECODE, world.now_s)
        world.now_s, world.stalled_s = world.now_s + 0.2018, world.stalled_s + 0.2
        world.gate.ended()
        world.want()
    assert world.gate.lent().breaches == {}
    assert world.gate.lent().seconds == pytest.approx(20 * 0.0018), "nor was it lent"
    assert world.gate._rollout.model.upper(DECODE) < 2 * before_s


def test_time_in_which_others_had_the_core_is_not_rationed(world: World) -> None:
    world.want(compute_share=0.5)
    for _ in range(3):
        assert world.is_open()
        world.gate.began(DECODE, world.now_s)
        world.now_s, world.stalled_s = world.now_s + 0.4, world.stalled_s + 0.399
        world.gate.ended()
    assert world.is_open()


def test_a_dry_run_adds_up_and_runs_nothing(world: World) -> None:
    world.want(dry_run=True)
    assert not world.is_open()
    world.now_s += 1.0
    assert not world.is_open()
    lent = world.gate.lent()
    assert lent.dry_run_tokens > 0
    assert lent.dry_run_s == pytest.approx(1.0)
    assert world.gate.is_keen(has_work=False), "of every chance, though nobody waits"
    world.want()
    world.gate.obey()
    assert not world.gate.is_keen(has_work=False)


def test_a_dry_run_counts_whatever_is_stopped(world: World) -> None:
    world.want(dry_run=True, stopped="paused by the owner", tokens=0, sequences=0)
    assert not world.is_open()
    world.now_s += 1.0
    assert not world.is_open()
    assert world.gate.lent().dry_run_tokens > 0


def test_a_dry_run_keeps_the_owners_limit_on_time(world: World) -> None:
    world.want(dry_run=True, compute_share=0.1)
    for _ in range(11):
        assert not world.is_open()
        world.now_s += 1.0
    assert 0.9 < world.gate.lent().dry_run_lent_s < 1.3


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


@pytest.mark.parametrize(
    "mode, is_step_news", [pytest.param("idle", False, id="idle"), pytest.param("decode", True, id="decode")]
)
def test_who_waits_at_the_gate_hears_of_what_may_open_it(tmp_path: Path, mode: str, is_step_news: bool) -> None:
    world = World(tmp_path, mode)
    world.learn()

    def hears(*, is_keen: bool = True) -> bool:
        return world.gate.wait_for_news(0.001, is_keen=is_keen)

    world.show(waiting=(world.now_s, 31))
    assert not world.is_open()
    assert not hears()
    world.board.step((world.now_s, world.now_s + 0.01, *dataclasses.astuple(DECODE)))
    assert hears() == is_step_news, "in idle mode busy serving is no news"
    world.show()
    assert hears() and hears(), "until it is asked"
    assert not hears(is_keen=False), "nothing waits here, so only what rings now matters"
    assert world.is_open()
    assert not hears()
    world.want(stopped="paused by the owner")
    world.show()
    assert not world.is_open()
    assert not hears(), "a gate that is closed for another reason is not asked again and again"


@pytest.mark.parametrize("mode", ["idle", "decode"])
def test_that_serving_has_run_out_of_work_is_heard_without_a_step(tmp_path: Path, mode: str) -> None:
    """As when its last request is aborted."""
    world = World(tmp_path, mode)
    world.learn()
    world.show(waiting=(world.now_s, 31))
    assert not world.is_open()
    assert not world.gate.wait_for_news(0.001, is_keen=True)
    world.show()
    assert world.gate.wait_for_news(1.0, is_keen=True)


def test_a_closed_gate_that_rollouts_have_left_is_asked_for_them(world: World) -> None:
    nobody = RolloutView()
    assert world.is_open()
    assert world.gate.ask(nobody).reason == "rollouts have nothing to run"
    world.show(running=(world.now_s, 31, world.now_s))
    assert not world.is_open()
    assert world.gate.ask(nobody).reason == "serving has work"
    world.show()
    for _ in range(2):  # it does not close because it was asked
        assert world.gate.ask(nobody).is_open(world.now_s)
    assert world.is_open()
    assert world.gate.ask(nobody).reason == "rollouts have nothing to run"
    assert world.gate.lent().closed_s.keys() == {"serving has work"}


def test_how_long_serving_is_silent_makes_no_reason_of_its_own(tmp_path: Path) -> None:
    world = World(tmp_path, "decode")
    world.learn()
    world.show(running=(world.now_s, 31, world.now_s))
    for passed_s in (6.0, 1.0, 1.0, 1.0):
        world.now_s += passed_s
        world.want()
        assert not world.is_open()
    assert world.gate.lent().closed_s == {"the serving engine has work and is silent": pytest.approx(3.0)}


def test_how_long_rollouts_waited_is_told_by_the_reason(world: World) -> None:
    world.show(running=(world.now_s, 31, world.now_s))
    for _ in range(3):
        assert not world.is_open()
        world.now_s += 1.0
    world.show()
    assert world.is_open()
    world.now_s += 1.0
    world.show(running=(world.now_s, 31, world.now_s))
    assert not world.gate.ask(RolloutView()).is_open(world.now_s), "nobody waits"
    world.now_s += 1.0
    world.gate.ask(RolloutView())
    assert world.gate.lent().closed_s == {"serving has work": pytest.approx(3.0)}


def test_a_model_by_which_no_step_fits_is_doubted(world: World) -> None:
    """Nothing runs that could prove it wrong. So one token is tried, and what it takes counts more than what was."""
    mislead(world)
    assert "no step fits" in world.gate.ask(WORK).reason
    assert tokens_after(world, 59.0) == 0
    assert tokens_after(world, 2.0) == 1
    run(world, StepFeatures(1, 100, 100, 1))
    for number in range(80):
        tokens = world.gate.ask(WORK).tokens
        run(world, StepFeatures(max(2, tokens), 100, 5000, 1) if number % 2 else StepFeatures(1, 100, 100, 1))
        world.want()
    assert world.gate.ask(WORK).reason == "serving has no work"
    assert world.gate.ask(WORK).tokens == WORK.decoding + WORK.prompt_tokens


def test_a_model_that_was_right_is_doubted_ever_less_often(world: World) -> None:
    mislead(world)
    assert tokens_after(world, 0.0) == 0
    for patience_s in (60.0, 120.0, 240.0):
        assert tokens_after(world, patience_s - 1.0) == 0
        assert tokens_after(world, 2.0) == 1
        run(world, StepFeatures(1, 100, 100, 1), seconds=2.0)
        assert tokens_after(world, 0.0) == 0


def mislead(world: World) -> None:
    """Steps were tried on a machine that was busy with something else."""
    learner = world.gate._rollout
    learner.forget()
    for number in range(80):
        learner.observe(StepFeatures(50 + number, 50, 2000, 1) if number % 2 else DECODE, 2.0)


def tokens_after(world: World, seconds: float) -> int:
    world.now_s += seconds
    world.want()
    return world.gate.ask(WORK).tokens


def run(world: World, shape: StepFeatures, seconds: float = 1e-3) -> None:
    world.gate.began(shape, world.now_s)
    world.now_s += seconds + 1e-5 * shape.new_tokens
    world.gate.ended()
