"""The rollout worker for TRL: every trajectory becomes one row or is accounted for, and trouble reaches the trainer."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.adapters.trl_world import LABEL, eventually, held, take

from rose.adapters import trl
from rose.api.trajectories import BeginBody, FinishBody
from rose.errors import RequestRefused, Unavailable


def test_a_group_becomes_rows_with_advantages_within_it(pool, worker):
    found = worker()
    found.start()
    rows = take(found, 8)
    assert Counter(row.group_id for row in rows) == {0: 4, 1: 4}
    first = rows[:4]
    assert [round(row.advantage, 3) for row in first] == [-1.342, -0.447, 0.447, 1.342]
    assert first[0].metrics == {"reward": 0.0, "reward_std": pytest.approx(1.118, abs=1e-3), "rewards/by_member": 0.0}
    for row in rows:
        assert row.input_ids.dtype == row.completion_mask.dtype == np.int64 and row.old_log_probs.dtype == np.float32
        answer = row.completion_mask.astype(bool)
        assert set(row.old_log_probs[answer]) == {-0.5} and not row.old_log_probs[~answer].any()
        [message] = row.completion
        assert message["content"] == pool.folder.tokenizer.decode(row.input_ids[answer].tolist())
        assert row.model_version == 1 and row.enqueued_at is not None
    assert [row.prompt[0]["content"] for row in (rows[0], rows[4])] == ["0?", "1?"]
    bodies = list(pool.gateway.ended.values())
    assert [body.reward for body in bodies[:4]] == [0.0, 1.0, 2.0, 3.0]


def test_members_of_a_group_draw_with_seeds_of_their_own(pool, worker):
    found = worker(num_generations=8)
    found.start()
    assert len({tuple(row.input_ids) for row in take(found, 8)}) > 1


def test_episodes_of_an_environment_become_rows(pool, worker):
    found = worker(environment="frozenlake")
    found.start()
    rows = take(found, 8)
    assert max(np.flatnonzero(np.diff(row.completion_mask) == -1).size for row in rows) > 0  # several turns
    assert {row.metrics["rewards/success"] for row in rows} <= {0.0, 1.0}
    assert {row.metrics["reward"] for row in rows} == {row.metrics["rewards/frozenlake"] for row in rows}
    assert "frozenlake" not in rows[0].prompt and isinstance(rows[0].completion, str)


def test_what_cannot_be_scored_is_lost_and_does_not_count_in_its_group(pool, worker):
    found = worker(lambda completions, **_: [None, 1.0, 1.0, 3.0])
    found.start()
    rows = take(found, 3)
    assert [round(row.advantage, 2) for row in rows] == [-0.71, -0.71, 1.41]
    assert found.counts["lost"] >= 1
    assert [body.is_lost for body in list(pool.gateway.ended.values())[:4]] == [True, False, False, False]


def test_rewards_of_several_functions_are_summed_also_asynchronous_ones(worker):
    async def bonus(completions, **_):
        await asyncio.sleep(0)
        return [None, 10.0, None, 10.0]

    def rank(completions, **_):
        return [0, 1, 2, 3]

    found = worker([rank, bonus])
    found.start()
    rows = take(found, 4)
    assert [row.metrics["reward"] for row in rows] == [0, 11, 2, 13]
    assert np.isnan(rows[0].metrics["rewards/bonus"])


def test_no_more_is_begun_than_can_be_trained_on_in_time(pool, worker):
    found = worker(max_inflight_tasks=8)
    found.start()
    eventually(lambda: found.rollout_buffer.qsize() == 8)
    assert found.counts["begun"] == 8
    take(found, 4)
    eventually(lambda: found.rollout_buffer.qsize() == 8)
    assert found.counts["begun"] == 12


def test_a_pool_that_is_behind_gets_fewer_groups(pool, worker):
    found = worker(max_inflight_tasks=8, max_staleness=2)
    pool.gateway.version = "0"  # which the trainer did not publish
    found.start()
    eventually(lambda: found.counts["unknown_version"] > 0)
    assert found._samples_max() == 4
    pool.gateway.version = LABEL
    eventually(lambda: found._samples_max() == 8)


def test_rows_beyond_the_bound_and_of_unknown_weights_are_dropped_and_counted(pool, worker, caplog):
    found = worker(max_staleness=2)
    found.start()
    take(found, 4)
    found.update_model_version(4)
    eventually(lambda: found.counts["stale"] >= 4)
    pool.gateway.version = "9-of-another-trainer"
    eventually(lambda: found.counts["unknown_version"] >= 4)
    assert "did not publish" in caplog.text


def test_a_row_has_the_version_of_its_oldest_token(pool, worker):
    pool.numbers |= {"2-b": 2, "3-c": 3}
    labels = iter(["3-c", "2-b", "3-c"] * 100)

    def mixed(trajectories):
        return [
            replace(row, versions=tuple(next(labels) if own else "" for own in row.loss_mask)) for row in trajectories
        ]

    pool.gateway.tamper = mixed
    found = worker()
    found.update_model_version(3)
    found.start()
    assert {row.model_version for row in take(found, 4)} == {2}


def test_groups_of_an_earlier_trainer_are_dropped(pool, worker, caplog):
    async def leave(gateway):
        await gateway.begin(BeginBody(id="old/0", group="old", group_size=1))
        await gateway.finish("old/0", FinishBody(is_lost=True))

    pool.ask(leave)
    found = worker()
    found.start()
    assert len(take(found, 4)) == 4
    assert "another trainer" in caplog.text


def test_tokens_that_were_not_played_stop_the_run(pool, worker):
    pool.gateway.tamper = lambda rows: [replace(row, token_ids=(1, *row.token_ids[1:])) for row in rows]
    found = worker()
    found.start()
    eventually(lambda: found._error is not None)
    with pytest.raises(Unavailable, match=r"other tokens of r/.* than were played"):
        found.check_health(300.0)


def test_a_reward_function_that_raises_stops_the_run_with_its_error(pool, worker):
    def broken(**_):
        raise KeyError("gold")

    found = worker(broken)
    found.start()
    eventually(lambda: found._error is not None)
    with pytest.raises(Unavailable, match="gold") as raised:
        found.check_health(300.0)
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize("rewards, reason", [([1.0], "1 rewards for 4"), (None, "NoneType")])
def test_rewards_that_do_not_fit_stop_the_run(worker, rewards, reason):
    found = worker(lambda **_: rewards)
    found.start()
    eventually(lambda: found._error is not None)
    with pytest.raises(Unavailable, match=reason):
        found.check_health(300.0)


def test_silence_is_explained_by_the_pool(pool, worker, monkeypatch, caplog):
    pool.gateway.pause, pool.gateway.workers = held(), ["behind"]
    found = worker()
    found.start()
    found.check_health(300.0)
    monkeypatch.setattr(trl, "QUIET_S", 0.0)
    found.check_health(300.0)
    assert "3 turns wait at the gateway for w0 is behind its relay is away" in caplog.text
    with pytest.raises(Unavailable, match="no rollout has ended for") as raised:
        found.check_health(0.0)
    assert "start workers" in str(raised.value)


def test_a_trainer_that_takes_nothing_for_long_is_no_silence(pool, worker, monkeypatch):
    found = worker()
    found.start()
    eventually(lambda: found.rollout_buffer.qsize() == 8)
    before_s = found._progress_s
    eventually(lambda: found._progress_s > before_s)


def test_stopping_ends_the_thread_and_may_be_repeated(pool, worker):
    pool.gateway.pause = held()
    found = worker()
    found.stop()  # never started
    found.start()
    for _ in range(2):
        found.stop()
        assert not found._thread.is_alive()
    found.check_health(300.0)


def test_a_gateway_that_refuses_the_token_is_an_error_of_the_start(pool, worker, monkeypatch):
    async def refuse():
        raise RequestRefused("the gateway answered 401: the token is wrong")

    found = worker()
    monkeypatch.setattr(pool.gateway, "pool", refuse)
    with pytest.raises(RequestRefused, match="401"):
        found.start()


def test_what_is_measured_reaches_trls_log(pool, worker):
    found = worker()
    found.start()
    take(found, 4)
    values = found.metrics_queue.get(timeout=10)
    assert values["rollout/delivered_total"] == 4.0 and values["rollout/turns_mean"] == (4.0, 4.0)
