"""Which groups a step trains on does not depend on the order in which their members end."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rose.core.groups import GroupRules, Keep
from rose.core.staleness import GroupStream, StalenessRules
from rose.core.trajectory import Trajectory

SIZE = 3
TRAJECTORY = Trajectory("t", "g", (1,), (True,), (0.0,), ("0",), 0.0)


def played(rules: GroupRules, alike: frozenset[int], seed: int) -> tuple[dict[int, tuple[int, ...]], int]:
    """A step in which members end in the order of the dice: what was kept, and how many groups were drawn."""
    groups, dice = GroupStream(rules, StalenessRules(0, rules.groups, 1)), random.Random(seed)
    under_way: list[tuple[int, int]] = []
    kept: dict[int, tuple[int, ...]] = {}
    while (taken := groups.batch(0)) is None:
        under_way += [(draw.group, member) for draw in groups.to_draw() for member in range(draw.size)]
        group, member = under_way.pop(dice.randrange(len(under_way)))
        fate = groups.on_finished(group, member, 0.0 if group in alike else float(member))
        if isinstance(fate, Keep):
            kept[group] = fate.members
            groups.on_arrived(group, [TRAJECTORY] * SIZE)
    assert taken == tuple(sorted(kept)) and groups.drop_surplus() == []
    return kept, groups.next_group


@given(
    wanted=st.integers(1, 4),
    more=st.integers(0, 6),
    dynamic_sampling=st.booleans(),
    alike=st.frozensets(st.integers(0, 12), max_size=8),
    seeds=st.tuples(st.integers(0, 1 << 30), st.integers(0, 1 << 30)),
)
def test_the_same_groups_are_drawn_and_kept_in_any_order(wanted, more, dynamic_sampling, alike, seeds):
    rules = GroupRules(wanted, SIZE, dynamic_sampling=dynamic_sampling, draws_max=wanted + more)
    assert played(rules, alike, seeds[0]) == played(rules, alike, seeds[1])
