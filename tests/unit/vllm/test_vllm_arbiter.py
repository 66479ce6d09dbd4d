"""The gate of a rollout engine, with a board and a desk as real as they get, and a clock that the test moves."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
from tests.unit.core.test_observed_engine import DECODE, WORK, teach
from tests.unit.vllm.test_status_segment import WRITE_ONE, header, start

from rose.core.facts import RolloutView, StepFeatures
from rose.core.history import ServingHistory
from rose.core.observed_engine import MilestoneKind
from rose.vllm.control_segment import EngineControl, Terms, open_control
from rose.vllm.status_segment import SegmentWriter
from rose.vllm.vllm_arbiter import RunQueueDelay, VllmArbiter


class World:
    """A serving engine's board, an agent's desk and the gate between them."""

    def __init__(self, folder: Path, mode: str = "idle") -> None:
        self.now_s, self.delayed_s = 100.0, 0.0
        self.path = folder / "serving.board"
        self.segment = SegmentWriter(self.path, header())
        self.agent = open_control(folder, create=True)
        clocks = {"now_s": lambda: self.now_s, "delayed_s": lambda: self.delayed_s}
        self.arbiter = VllmArbiter(open_control(folder), step_tokens=256, sequences=16, **clocks)  # type: ignore[arg-type]
        self.terms = Terms(str(self.path), mode)  # type: ignore[arg-type]
        self.want()
        self.show()
        self.arbiter.observe()

    def want(self, **changes: object) -> None:
        plain = {"tokens": 1 << 20, "sequences": 1 << 20, "until_s": self.now_s + 5.0, "terms": self.terms}
        self.agent.write(EngineControl(**{**plain, **changes}))  # type: ignore[arg-type]

    def show(self, waiting: tuple[float, ...] = (), running: tuple[float, ...] = ()) -> None:
        self.segment.view(self.now_s, waiting, running, 0)

    def one(self) -> tuple[float, ...]:
        """A request that has its first token."""
        return (self.now_s, 31, self.now_s, self.now_s, 1)

    def learn(self) -> None:
        """Both models, by what they would see, long ago; and traffic has been observed for long."""
        for number in range(80):
            prompt, began_s = number % 2, self.now_s - 90.0 + number
            shape = StepFeatures(50 + number, 50, 2000, 1) if prompt else DECODE
            ended_s = began_s + 1e-3 + 1e-4 * shape.new_tokens
            self.segment.step((began_s, ended_s, *dataclasses.astuple(shape)))
        self.arbiter.observe()
        self.history.bursts.restore(1e6, (), (), self.now_s)
        teach(self.arbiter._rollout)

    @property
    def history(self) -> ServingHistory:
        assert self.arbiter._serving is not None
        return self.arbiter._serving.lending.admission.history

    def is_open(self) -> bool:
        return self.arbiter.ask(WORK).is_open(self.now_s)


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.learn()
    return made


def test_without_an_agent_nothing_runs(tmp_path: Path) -> None:
    open_control(tmp_path, create=True)
    arbiter = VllmArbiter(open_control(tmp_path), step_tokens=256, sequences=16)
    assert not arbiter.ask(WORK).is_open(0.0)
    assert "granted nothing" in arbiter.last_grant.reason


def test_nothing_runs_until_serving_step_times_are_known(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert not world.is_open()
    assert "learning" in world.arbiter.last_grant.reason
    assert "0 steps seen" in world.arbiter.account().missing
    world.learn()
    assert world.is_open()
    assert world.arbiter.account().missing == ""


def test_admission_opens_and_closes_with_serving(world: World) -> None:
    assert world.is_open()
    world.segment.milestone(MilestoneKind.ARRIVED, 1, world.now_s, tokens=30)
    assert not world.is_open(), "before any view tells of it"
    world.show(running=world.one())
    assert not world.is_open()
    world.show()
    assert world.is_open()


def test_decode_lends_beside_decoding_within_both_grants(tmp_path: Path) -> None:
    world = World(tmp_path, "decode")
    world.learn()
    world.show(running=world.one())
    grant = world.arbiter.ask(WORK)
    assert grant.is_open(world.now_s)
    world.want(tokens=3, sequences=2, until_s=world.now_s + 0.001)
    grant = world.arbiter.ask(WORK)
    assert (grant.tokens, grant.sequences) == (3, 2)
    assert grant.until_s <= world.now_s + 0.001


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"until_s": 1.0}, "is over"),
        ({"tokens": 0}, "is over"),
        ({"stopped": "paused by the owner"}, "paused by the owner"),
        ({"terms": Terms("/nowhere")}, "no status segment"),
    ],
)
def test_the_agents_control_closes_admission(world: World, changes: dict[str, object], why: str) -> None:
    world.want(**changes)
    assert not world.is_open()
    assert why in world.arbiter.last_grant.reason
    world.want()
    assert world.arbiter.has_new_control and world.arbiter.wait_for_control(60.0)


def test_a_grant_that_is_not_renewed_expires(world: World) -> None:
    world.now_s += 5.1
    world.show()
    assert not world.is_open()
    assert world.arbiter.last_grant.reason == "the agent's grant is over"


def test_a_dead_serving_engine_closes_admission(world: World, tmp_path: Path) -> None:
    path = tmp_path / "other.board"
    process: subprocess.Popen[str] = start(WRITE_ONE, path)
    world.want(terms=Terms(str(path)))
    assert "learning" in world.arbiter.ask(WORK).reason, "another boot is another engine: nothing is known of it"
    assert world.history.bursts.observed_s(world.now_s) == 1e6, "but of its traffic"
    process.kill()
    process.wait()
    assert world.arbiter.ask(WORK).reason == "the serving engine is gone"


def test_a_stale_or_stopped_segment_closes_admission(tmp_path: Path) -> None:
    world = World(tmp_path, "decode")
    world.learn()
    world.show(running=world.one())
    assert world.is_open()
    world.now_s += 6.0
    world.want()
    assert "silent" in world.arbiter.ask(WORK).reason
    world.show()
    assert world.is_open()
    world.segment.publish_stop("RuntimeError: no")
    assert "RuntimeError: no" in world.arbiter.ask(WORK).reason


def test_new_terms_keep_what_was_learnt_of_the_same_engine(world: World) -> None:
    learner = world.arbiter._serving.lending.serving
    seen = learner.seen
    world.want(terms=Terms(str(world.path), "idle", ttft_s=2.0))
    assert world.is_open()
    assert (world.arbiter._serving.lending.serving, learner.seen) == (learner, seen), "nor is anything learnt twice"
    assert world.history.bursts.observed_s(world.now_s) == 1e6


def test_a_fresh_engine_learns_from_the_history_in_the_segment(world: World, tmp_path: Path) -> None:
    fresh = VllmArbiter(open_control(tmp_path), step_tokens=256, sequences=16, now_s=lambda: world.now_s)
    fresh.observe()
    assert fresh.account().missing == ""


def test_steps_that_rollouts_may_have_slowed_are_not_learnt(world: World) -> None:
    """On no terms nobody sees what runs beside."""
    world.want(terms=None)
    world.arbiter.adopt_control()
    seen = world.arbiter._rollout.seen
    run(world, DECODE)
    assert world.arbiter._rollout.seen == seen, "nor as ours"
    world.segment.milestone(MilestoneKind.ARRIVED, 1, world.now_s, tokens=30)
    world.want()
    world.arbiter.observe()
    assert "0 steps seen" in world.arbiter.account().missing
    world.learn()
    assert world.arbiter.account().missing == ""
    assert "has work" in world.arbiter.ask(WORK).reason, "who came before is known to wait"


def test_without_terms_the_grant_is_all_there_is(world: World) -> None:
    world.want(terms=None, tokens=7, sequences=1)
    world.segment.milestone(MilestoneKind.ARRIVED, 1, world.now_s, tokens=30)
    grant = world.arbiter.ask(WORK)
    assert (grant.tokens, grant.sequences, grant.is_open(world.now_s)) == (7, 1, True)


def test_steps_are_accounted_for_and_limited_by_the_compute_share(world: World) -> None:
    world.want(compute_share=0.5)
    assert world.is_open()
    for _ in range(2):
        world.arbiter.on_step_began(DECODE, world.now_s)
        world.now_s += 0.2
        world.arbiter.on_step_ended()
    lent = world.arbiter.account()
    assert (lent.steps, lent.tokens) == (2, 2 * DECODE.new_tokens)
    assert lent.seconds == pytest.approx(0.4)
    assert lent.breaches["step"] >= 1, "by the second the model has learnt that this device is slow"
    assert "50%" in world.arbiter.ask(WORK).reason
    world.now_s += 2.0
    world.show()
    assert world.is_open()


def test_run_queue_delay_is_not_part_of_a_step(world: World) -> None:
    """A busy machine must not teach that steps are long: whoever is kept from running holds nothing."""
    before_s = world.arbiter._rollout.model.upper(DECODE)
    for _ in range(20):
        assert world.is_open()
        world.arbiter.on_step_began(DECODE, world.now_s)
        world.now_s, world.delayed_s = world.now_s + 0.2018, world.delayed_s + 0.2
        world.arbiter.on_step_ended()
        world.want()
    assert world.arbiter.account().breaches == {}
    assert world.arbiter.account().seconds == pytest.approx(20 * 0.0018), "nor was it lent"
    assert world.arbiter._rollout.model.upper(DECODE) < 2 * before_s


def test_run_queue_delay_does_not_use_up_the_compute_share(world: World) -> None:
    world.want(compute_share=0.5)
    for _ in range(3):
        assert world.is_open()
        world.arbiter.on_step_began(DECODE, world.now_s)
        world.now_s, world.delayed_s = world.now_s + 0.4, world.delayed_s + 0.399
        world.arbiter.on_step_ended()
    assert world.is_open()


def test_a_dry_run_counts_tokens_and_runs_nothing(world: World) -> None:
    world.want(dry_run=True)
    assert not world.is_open()
    world.now_s += 1.0
    assert not world.is_open()
    lent = world.arbiter.account()
    assert lent.dry_run_tokens > 0
    assert lent.dry_run_s == pytest.approx(1.0)
    assert world.arbiter.is_eager(has_work=False), "of every chance, though nobody waits"
    world.want()
    world.arbiter.adopt_control()
    assert not world.arbiter.is_eager(has_work=False)


def test_a_dry_run_counts_though_the_operator_has_stopped_lending(world: World) -> None:
    world.want(dry_run=True, stopped="paused by the owner", tokens=0, sequences=0)
    assert not world.is_open()
    world.now_s += 1.0
    assert not world.is_open()
    assert world.arbiter.account().dry_run_tokens > 0


def test_a_dry_run_keeps_the_compute_share(world: World) -> None:
    world.want(dry_run=True, compute_share=0.1)
    for _ in range(11):
        assert not world.is_open()
        world.now_s += 1.0
    assert 0.9 < world.arbiter.account().dry_run_lent_s < 1.3


def test_a_resume_closes_a_tripped_breaker(world: World) -> None:
    for key in range(4):  # four first tokens that were late by what was lent in front of them
        world.arbiter.on_step_began(DECODE, world.now_s)
        world.segment.milestone(MilestoneKind.ARRIVED, key, world.now_s, tokens=30)
        world.now_s += 0.4
        world.arbiter.on_step_ended()
        world.now_s += 0.2
        world.segment.milestone(MilestoneKind.FIRST_TOKEN, key, world.now_s)
        world.segment.milestone(MilestoneKind.ENDED, key, world.now_s, tokens=1)
        world.show()
    world.want()
    assert "circuit breaker" in world.arbiter.ask(WORK).reason
    assert world.arbiter.account().breaker_trips == 1
    world.want(resumes=1)
    assert world.is_open()


@pytest.mark.parametrize(
    "mode, is_step_news", [pytest.param("idle", False, id="idle"), pytest.param("decode", True, id="decode")]
)
def test_waiters_are_woken_by_what_may_open_admission(tmp_path: Path, mode: str, is_step_news: bool) -> None:
    world = World(tmp_path, mode)
    world.learn()

    def hears(*, is_eager: bool = True) -> bool:
        return world.arbiter.wait_for_serving(0.001, is_eager=is_eager)

    world.show(waiting=(world.now_s, 31))
    assert not world.is_open()
    assert not hears()
    world.segment.step((world.now_s, world.now_s + 0.01, *dataclasses.astuple(DECODE)))
    assert hears() == is_step_news, "in idle mode busy serving is no news"
    world.show()
    assert hears() and hears(), "until it is asked"
    assert not hears(is_eager=False), "nothing waits here, so only what rings now matters"
    assert world.is_open()
    assert not hears()
    world.want(stopped="paused by the owner")
    world.show()
    assert not world.is_open()
    assert not hears(), "a gate that is closed for another reason is not asked again and again"


@pytest.mark.parametrize("mode", ["idle", "decode"])
def test_an_idle_serving_engine_wakes_waiters_without_a_step(tmp_path: Path, mode: str) -> None:
    """As when its last request is aborted."""
    world = World(tmp_path, mode)
    world.learn()
    world.show(waiting=(world.now_s, 31))
    assert not world.is_open()
    assert not world.arbiter.wait_for_serving(0.001, is_eager=True)
    world.show()
    assert world.arbiter.wait_for_serving(1.0, is_eager=True)


def test_blocked_admission_is_still_decided_for_rollouts_that_left(world: World) -> None:
    nobody = RolloutView()
    assert world.is_open()
    assert world.arbiter.ask(nobody).reason == "rollouts have nothing to run"
    world.show(running=world.one())
    assert not world.is_open()
    assert world.arbiter.ask(nobody).reason == "serving has work"
    world.show()
    for _ in range(2):  # it does not close because it was asked
        assert world.arbiter.ask(nobody).is_open(world.now_s)
    assert world.is_open()
    assert world.arbiter.ask(nobody).reason == "rollouts have nothing to run"
    assert world.arbiter.account().closed_s.keys() == {"serving has work"}


def test_seconds_of_silence_make_no_reason_of_their_own(tmp_path: Path) -> None:
    world = World(tmp_path, "decode")
    world.learn()
    world.show(running=world.one())
    for passed_s in (6.0, 1.0, 1.0, 1.0):
        world.now_s += passed_s
        world.want()
        assert not world.is_open()
    assert world.arbiter.account().closed_s == {"the serving engine has work and is silent": pytest.approx(3.0)}


def test_waiting_time_is_counted_by_reason(world: World) -> None:
    world.show(running=world.one())
    for _ in range(3):
        assert not world.is_open()
        world.now_s += 1.0
    world.show()
    assert world.is_open()
    world.now_s += 1.0
    world.show(running=world.one())
    assert not world.arbiter.ask(RolloutView()).is_open(world.now_s), "nobody waits"
    world.now_s += 1.0
    world.arbiter.ask(RolloutView())
    assert world.arbiter.account().closed_s == {"serving has work": pytest.approx(3.0)}


def test_a_latency_model_by_which_no_step_fits_is_tried_again(world: World) -> None:
    """Nothing runs that could prove it wrong. So one token is tried, and what it takes counts more than what was."""
    mislead(world)
    assert "no step fits" in world.arbiter.ask(WORK).reason
    assert tokens_after(world, 59.0) == 0
    assert tokens_after(world, 2.0) == 1
    run(world, StepFeatures(1, 100, 100, 1))
    for number in range(80):
        tokens = world.arbiter.ask(WORK).tokens
        run(world, StepFeatures(max(2, tokens), 100, 5000, 1) if number % 2 else StepFeatures(1, 100, 100, 1))
        world.want()
    assert world.arbiter.ask(WORK).reason == "serving has no work"
    assert world.arbiter.ask(WORK).tokens == WORK.decoding + WORK.prompt_tokens


def test_a_latency_model_that_was_right_is_tried_less_often(world: World) -> None:
    mislead(world)
    assert tokens_after(world, 0.0) == 0
    for patience_s in (60.0, 120.0, 240.0):
        assert tokens_after(world, patience_s - 1.0) == 0
        assert tokens_after(world, 2.0) == 1
        run(world, StepFeatures(1, 100, 100, 1), seconds=2.0)
        assert tokens_after(world, 0.0) == 0


def mislead(world: World) -> None:
    """Steps were tried on a machine that was busy with something else."""
    learner = world.arbiter._rollout
    learner.forget()
    for number in range(80):
        learner.observe(StepFeatures(50 + number, 50, 2000, 1) if number % 2 else DECODE, 2.0)


def tokens_after(world: World, seconds: float) -> int:
    world.now_s += seconds
    world.want()
    return world.arbiter.ask(WORK).tokens


def run(world: World, shape: StepFeatures, seconds: float = 1e-3) -> None:
    world.arbiter.on_step_began(shape, world.now_s)
    world.now_s += seconds + 1e-5 * shape.new_tokens
    world.arbiter.on_step_ended()


@pytest.mark.parametrize("cores, delayed_s", [({3}, 5.0), ({3, 4}, 0.0)])
def test_run_queue_delay_counts_on_one_core_only(
    cores: set[int], delayed_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
    monkeypatch.setattr(os, "open", lambda *arguments: 99)
    monkeypatch.setattr(os, "pread", lambda *arguments: b"7 5000000000 3")
    assert RunQueueDelay().seconds() == delayed_s
