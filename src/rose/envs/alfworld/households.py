"""Households of our own: rooms with a task, drawn by a seed, always solvable, with the way to solve them.

ALFWorld's games come from a data set of scenes. These need none: a seed draws a room, puts things in it, and one task
of ALFWorld's six kinds. The task is made around a thing that exists and a place that can take it, so there is always a
way to solve it (`expert` says which). `problem` writes the household in PDDL for ALFWorld's own domain, so that the
game itself, its rules and its texts, are ALFWorld's.

    kind    task                                     ALFWorld's name
    place   put a mug in shelf                       pick_and_place_simple
    clean   put a clean mug in shelf                 pick_clean_then_place_in_recep
    heat    put a hot mug in shelf                   pick_heat_then_place_in_recep
    cool    put a cool mug in shelf                  pick_cool_then_place_in_recep
    light   look at book under the desklamp          look_at_obj_in_light
    two     put two mug in shelf                     pick_two_obj_and_place

No thing is where the task wants it at the beginning, and every door is closed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from rose.envs.alfworld.rooms import CLEANABLE, COOLABLE, HEATABLE, LAMP, LAMP_PLACES, ROOMS, Place, things_of

KINDS = {
    "place": "pick_and_place_simple",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "light": "look_at_obj_in_light",
    "two": "pick_two_obj_and_place",
}
TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
ABLE = {"clean": CLEANABLE, "heat": HEATABLE, "cool": COOLABLE}
TASKS = {
    "place": "put a {thing} in {goal}",
    "clean": "put a clean {thing} in {goal}",
    "heat": "put a hot {thing} in {goal}",
    "cool": "put a cool {thing} in {goal}",
    "light": "look at {thing} under the desklamp",
    "two": "put two {thing} in {goal}",
}
PLACES_MIN, PLACES_MAX = 4, 20
THINGS_MAX = 40


@dataclass(frozen=True, slots=True)
class Thing:
    """`kind` is its name without the number; `at` is the name of the place where it lies at first."""

    name: str
    kind: str
    at: str


@dataclass(frozen=True, slots=True)
class Household:
    kind: str
    task: str
    places: dict[str, str]  # name -> kind, such as "cabinet 2" -> "cabinet"
    openable: frozenset[str]
    things: tuple[Thing, ...]
    target: str  # the kind of thing that the task is about
    goal: str  # the kind of place that it belongs to; the lamp's place in `light`


def draw_household(seed: int, kinds: tuple[str, ...], places: int = 7, things: int = 8) -> Household:
    """The household of this seed: a task of one of these kinds, in a room of so many places with so many things."""
    return _Drawing(random.Random(f"household/{seed}"), kinds, places, things).household()


class _Drawing:
    """One household in the making."""

    def __init__(self, dice: random.Random, kinds: tuple[str, ...], places: int, things: int) -> None:
        self._dice, self._places_wanted, self._things_wanted = dice, places, things
        self._kind = dice.choice(kinds)
        self._room = ROOMS[self._room_name()]
        self._tool = TOOLS.get(self._kind)
        self._numbers: Counter[str] = Counter()

    def household(self) -> Household:
        target, goal = self._target_and_goal()
        source = self._dice.choice([kind for kind in self._holders(target) if kind != goal])
        places = self._places([kind for kind in (goal, source, self._tool) if kind is not None])
        copies = 2 if self._kind == "two" else 1
        free = [name for name, kind in places.items() if kind in self._holders(target) and kind != goal]
        wanted = tuple(self._thing(target, self._dice.choice(free)) for _ in range(copies))
        others = self._lamps(places, goal) + self._others(places, target)
        openable = frozenset(name for name, kind in places.items() if self._room[kind].is_openable)
        task = TASKS[self._kind].format(thing=target, goal=goal)
        return Household(self._kind, task, places, openable, wanted + others, target, goal)

    def _room_name(self) -> str:
        if self._kind in TOOLS:
            return "kitchen"
        return "bedroom" if self._kind == "light" else self._dice.choice(sorted(ROOMS))

    def _target_and_goal(self) -> tuple[str, str]:
        """A thing that can become what is asked, and a kind of place for it that is not the only one."""
        able = ABLE.get(self._kind)
        targets = [
            thing
            for thing in things_of(self._room)
            if (able is None or thing in able) and len(self._holders(thing)) >= 2 + (self._kind in TOOLS)
        ]
        target = self._dice.choice(targets)
        if self._kind == "light":
            return target, self._dice.choice(LAMP_PLACES)
        return target, self._dice.choice([kind for kind in self._holders(target) if kind != self._tool])

    def _holders(self, thing: str) -> list[str]:
        return [kind for kind, place in self._room.items() if thing in place.holds]

    def _places(self, needed: list[str]) -> dict[str, str]:
        """The needed kinds once each, and others up to the number wanted, numbered as they come."""
        kinds = list(dict.fromkeys(needed))
        spare = [kind for kind, place in self._room.items() for _ in range(place.count_max - (kind in kinds))]
        self._dice.shuffle(spare)
        kinds += spare[: max(0, self._places_wanted - len(kinds))]
        names = sorted(self._name(kind) for kind in kinds)
        return {name: name.rpartition(" ")[0] for name in names}

    def _lamps(self, places: dict[str, str], goal: str) -> tuple[Thing, ...]:
        if self._kind != "light":
            return ()
        return (self._thing(LAMP, next(name for name, kind in places.items() if kind == goal)),)

    def _others(self, places: dict[str, str], target: str) -> tuple[Thing, ...]:
        """Things that are in the way. None of them is of the target's kind: that one is found, not guessed."""
        found = []
        for _ in range(self._things_wanted - (2 if self._kind == "two" else 1)):
            at = self._dice.choice(list(places))
            kinds = [thing for thing in self._room[places[at]].holds if thing != target]
            if kinds:
                found.append(self._thing(self._dice.choice(kinds), at))
        return tuple(found)

    def _thing(self, kind: str, at: str) -> Thing:
        return Thing(self._name(kind), kind, at)

    def _name(self, kind: str) -> str:
        self._numbers[kind] += 1
        return f"{kind} {self._numbers[kind]}"


# PDDL


def problem(household: Household) -> str:
    """The household as a problem of ALFWorld's domain."""
    room = next(room for room in ROOMS.values() if set(household.places.values()) <= set(room))
    lines = ["(define (problem household) (:domain alfred)", "(:objects agent1 - agent", *_objects(household)]
    lines += [")", "(:init (= (total-cost) 0) (atLocation agent1 loc_0)", *_init(household, room), ")"]
    lines += [f"(:goal {_goal(household)})", "(:metric minimize (total-cost)))"]
    return "\n".join(lines)


def _objects(household: Household) -> list[str]:
    """The types that the domain itself speaks of are there even if the room has none of them."""
    place_kinds = sorted({*household.places.values(), *TOOLS.values()})
    thing_kinds = sorted({thing.kind for thing in household.things} | {LAMP, "knife", "butterknife"})
    return [
        " ".join(f"loc_{number}" for number in range(len(household.places) + 1)) + " - location",
        " ".join(map(_id, household.places)) + " - receptacle",
        " ".join(_id(thing.name) for thing in household.things) + " - object",
        " ".join(map(_type, place_kinds)) + " - rtype",
        " ".join(map(_type, thing_kinds)) + " - otype",
    ]


def _init(household: Household, room: dict[str, Place]) -> list[str]:
    where = {name: f"loc_{number}" for number, name in enumerate(household.places, start=1)}
    lines = []
    for name, kind in household.places.items():
        lines.append(f"(receptacleAtLocation {_id(name)} {where[name]}) (receptacleType {_id(name)} {_type(kind)})")
        if name in household.openable:
            lines.append(f"(openable {_id(name)})")
    for thing in household.things:
        name, at = _id(thing.name), _id(thing.at)
        lines.append(f"(objectType {name} {_type(thing.kind)}) (inReceptacle {name} {at})")
        lines.append(f"(wasInReceptacle {name} {at}) (objectAtLocation {name} {where[thing.at]})")
        lines += [f"({word} {name})" for word in _abilities(thing.kind)]
    kinds = sorted({thing.kind for thing in household.things} - {LAMP})
    for place in sorted(set(household.places.values())):
        lines += [f"(canContain {_type(place)} {_type(kind)})" for kind in kinds if kind in room[place].holds]
    return lines


def _abilities(kind: str) -> list[str]:
    if kind == LAMP:
        return ["toggleable"]
    able = {"cleanable": CLEANABLE, "heatable": HEATABLE, "coolable": COOLABLE}
    return ["pickupable", *(word for word, kinds in able.items() if kind in kinds)]


STATES = {"clean": "isClean", "heat": "isHot", "cool": "isCool"}


def _goal(household: Household) -> str:
    target, goal = _type(household.target), _type(household.goal)
    if household.kind == "light":
        held = f"(exists (?o - object ?a - agent) (and (objectType ?o {target}) (holds ?a ?o)))"
        lamp = f"(objectType ?l {_type(LAMP)}) (isToggled ?l) (inReceptacle ?l ?r)"
        near = "(receptacleAtLocation ?r ?x) (atLocation ?a ?x)"
        lit = f"(exists (?l - object ?r - receptacle ?a - agent ?x - location) (and {lamp} {near}))"
        return f"(and {held} {lit})"
    if household.kind == "two":
        each = " ".join(f"(objectType {o} {target}) (inReceptacle {o} ?r)" for o in ("?o", "?p"))
        wanted = f"(and (receptacleType ?r {goal}) {each} (not (= ?o ?p)))"
        return f"(exists (?r - receptacle ?o - object ?p - object) {wanted})"
    state = f" ({STATES[household.kind]} ?o)" if household.kind in STATES else ""
    wanted = f"(and (inReceptacle ?o ?r) (objectType ?o {target}) (receptacleType ?r {goal}){state})"
    return f"(exists (?r - receptacle ?o - object) {wanted})"


def _id(name: str) -> str:
    return name.replace(" ", "_")


def _type(kind: str) -> str:
    return f"{kind}Type"
