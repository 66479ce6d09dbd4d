"""An expert that knows the household: the next command of a short way to the end, from any state of the game.

It puts down what is not needed, fetches what is, treats it and brings it. It costs microseconds; a planner that knows
no households needs seconds in a large one.
"""

from __future__ import annotations

from rose.envs.alfworld.households import LAMP, TOOLS, Household

STEPS_MAX = 100
"""A bound on the expert's plan; no household needs more than a dozen steps."""


class Expert:
    """The expert of one game. It trusts its input: only commands that the game accepted."""

    def __init__(self, household: Household) -> None:
        first_of = {kind: name for name, kind in reversed(household.places.items())}
        self._kind, self._openable = household.kind, household.openable
        self._goal = first_of[household.goal]
        self._tool = first_of[TOOLS[household.kind]] if household.kind in TOOLS else None
        self._at = {thing.name: thing.at for thing in household.things}
        self._targets = [thing.name for thing in household.things if thing.kind == household.target]
        self._opened: set[str] = set()
        self._states: set[tuple[str, str]] = set()  # (thing, what was done to it)
        self._here = self._held = ""

    def on_command(self, command: str) -> None:
        """Record a command that the game accepted."""
        verb, _, rest = command.partition(" ")
        words = rest.split()  # such as `mug 1 from desk 2`
        first, second = " ".join(words[:2]), " ".join(words[3:])
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
        """Return the next command; None when nothing is left to do."""
        held, kind = self._held, self._kind
        if not held:
            missing = [thing for thing in self._targets if not self._is_done(thing)]
            if not missing:
                return None
            place = self._at[missing[0]]
            return self._reach(place) or f"take {missing[0]} from {place}"
        if held not in self._targets:
            place = self._at[held]  # where it came from: there it fits
            return self._reach(place) or f"move {held} to {place}"
        if kind == "light":
            return self._go(self._goal) or (None if (f"{LAMP} 1", "use") in self._states else f"use {LAMP} 1")
        if self._tool is not None and (held, kind) not in self._states:
            return self._go(self._tool) or f"{kind} {held} with {self._tool}"
        return self._reach(self._goal) or f"move {held} to {self._goal}"

    def _is_done(self, thing: str) -> bool:
        is_treated = self._tool is None or (thing, self._kind) in self._states
        return self._kind != "light" and self._at[thing] == self._goal and is_treated

    def _reach(self, place: str) -> str | None:
        """Return what is still to be done before one can reach into this place."""
        is_closed = place in self._openable - self._opened
        return self._go(place) or (f"open {place}" if is_closed else None)

    def _go(self, place: str) -> str | None:
        return None if self._here == place else f"go to {place}"


def plan_of(household: Household) -> tuple[str, ...]:
    """Return the commands that solve the household from the beginning."""
    expert, steps = Expert(household), []
    while (command := expert.next()) is not None:
        expert.on_command(command)
        steps.append(command)
        assert len(steps) < STEPS_MAX, household
    return tuple(steps)
