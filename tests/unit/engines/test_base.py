"""Plans describe what a step computes, and facts reach every subscriber in order."""

from __future__ import annotations

from rose.core.facts import StepFeatures
from rose.engines.base import PlannedRequest, StepPlan, Subscribers


def test_features_of_a_plan_count_new_tokens_and_the_context_they_read() -> None:
    decode = PlannedRequest("decode", 1, 99, samples=True)
    prefill = PlannedRequest("prefill", 4, 10, samples=False)
    # A new token attends to the context and to the new tokens up to itself: 1 x 99 + 1, and 4 x 10 + (1 + 2 + 3 + 4).
    assert StepPlan(1, (decode,)).features == StepFeatures(1, 100, 100, 1)
    assert StepPlan(1, (decode, prefill)).features == StepFeatures(5, 114, 150, 2)
    assert StepPlan(1, (), ("preempted",)).features == StepFeatures(0, 0, 0, 0)


def test_subscribers_are_called_in_order_until_they_unsubscribe() -> None:
    facts: Subscribers[str] = Subscribers()
    received_by: list[tuple[str, str]] = []
    stop_first = facts.subscribe(lambda fact: received_by.append(("first", fact)))
    facts.subscribe(lambda fact: received_by.append(("second", fact)))
    facts.publish("a")
    stop_first()
    stop_first()
    facts.publish("b")
    assert received_by == [("first", "a"), ("second", "a"), ("second", "b")]


def test_a_subscriber_may_unsubscribe_while_it_is_called() -> None:
    facts: Subscribers[int] = Subscribers()
    received: list[int] = []

    def once(fact: int) -> None:
        received.append(fact)
        stop()

    stop = facts.subscribe(once)
    facts.subscribe(lambda fact: received.append(-fact))
    facts.publish(1)
    facts.publish(2)
    assert received == [1, -1, -2]
