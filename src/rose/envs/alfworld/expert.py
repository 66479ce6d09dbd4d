"""Somebody who knows the household: what to do next, from wherever the game stands.

Told of every command that the game took (`saw`), the expert keeps its own picture of who is where, and says the next
command of a short way to the end: put down what is not wanted, fetch what is, treat it, bring it. From the beginning
this is the household's plan. It costs microseconds; a planner that knows no households needs seconds in a large one.
"""

from __future__ import annotations

from rose.envs.alfworld.households import TOOLS, Household
from rose.envs.alfworld.rooms import LAMP

STEPS_MAX = 100
"""No household takes more than a dozen."""


class Expert:
    """One game's. It trusts what it is told: only commands that were possible."""

    def __init__(self, household: Household) -> None:
        self._household = household
        self._at = {thing.name: thing.at for thing in household.things}
        self._targets = [thing.name for thing in household.things if thing.kind == household.target]
        self._goal = _first(household, household.goal)
        self._tool = _first(household, TOOLS[household.kind]) if household.kind in TOOLS else None
        self._opened: set[str] = set()
        self._states: set[tuple[str, str]] = set()  # (thing, what was done to it)
        self._here = self._held = ""

    def saw(self, command: str) -> None:
        """The game took this command."""
        verb, _, rest = command.partition(" ")
        first, second = _split(rest)
        if verb == "go":
            self._here = rest.removeprefix("to ")
        elif verb == "open":
            self._opened.add(rest)
        elif verb == "close":
            self._opened.discard(rest)
        elif verb == "take":
            self._held = first
        elif verb == "move":
            self._held, self._at[first] = "", second
        elif verb in ("clean", "heat", "cool", "use"):
            self._states -= {(first, {"heat": "cool", "cool": "heat"}.get(verb, ""))}
            self._states.add((first, verb))

    def next(self) -> str | None:
        """The next command; None when nothing is left to do."""
        if self._held and self._held not in self._targets:
            place = self._at[self._held]  # where it came from: there it fits
            return self._reach(place) or f"move {self._held} to {place}"
        if self._held:
            return self._with(self._held)
        missing = [name for name in self._targets if not self._is_done(name)]
        if not missing:
            return None
        place = self._at[missing[0]]
        return self._reach(place) or f"take {missing[0]} from {place}"

    def _with(self, thing: str) -> str | None:
        """What to do with the thing that is wanted and held."""
        kind = self._household.kind
        if kind == "light":
            return self._go(self._goal) or (None if (f"{LAMP} 1", "use") in self._states else f"use {LAMP} 1")
        if self._tool is not None and (thing, kind) not in self._states:
            return self._go(self._tool) or f"{kind} {thing} with {self._tool}"
        return self._reach(self._goal) or f"move {thing} to {self._goal}"

    def _is_done(self, thing: str) -> bool:
        kind = self._household.kind
        is_treated = self._tool is None or (thing, kind) in self._states
        return kind != "light" and self._at[thing] == self._goal and is_treated

    def _reach(self, place: str) -> str | None:
        """What is still to be done before one can reach into this place."""
        if (way := self._go(place)) is not None:
            return way
        return f"open {place}" if place in self._household.openable - self._opened else None

    def _go(self, place: str) -> str | None:
        return None if self._here == place else f"go to {place}"


def plan_of(household: Household) -> tuple[str, ...]:
    """The commands that solve it from the beginning."""
    expert, steps = Expert(household), []
    while (command := expert.next()) is not None:
        expert.saw(command)
        steps.append(command)
        assert len(steps) < STEPS_MAX, household
    return tuple(steps)


def _first(household: Household, kind: str) -> str:
    return next(name for name, place in household.places.items() if place == kind)


def _split(rest: str) -> tuple[str, str]:
    """`mug 1 from desk 2` -> `mug 1`, `desk 2`."""
    words = rest.split()
    return " ".join(words[:2]), " ".join(words[3:])
