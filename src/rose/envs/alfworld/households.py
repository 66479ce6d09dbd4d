"""Households of our own: rooms with a task of ALFWorld's six kinds, drawn by a seed, always solvable.

ALFWorld's games come from a data set of scenes; these need none. The task is made around a thing that exists and a
place that can take it, so there is always a way (`expert` knows it). No thing is where the task wants it at the
beginning, and every door is closed. `problem` writes the household in PDDL for ALFWorld's own domain, whose rules and
texts then play it. A *place* is a receptacle, which never moves; a *thing* is an object that can be carried.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

KINDS = {  # of tasks, by ALFWorld's names
    "place": "pick_and_place_simple",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "light": "look_at_obj_in_light",
    "two": "pick_two_obj_and_place",
}
TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
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

# What stands in a room, and what may lie on it. The short lists keep rooms plausible: no pillow lies in a fridge.
FOOD = ("apple", "tomato", "potato", "egg", "bread", "lettuce")
VESSELS = ("mug", "cup", "plate", "bowl")
PANS = ("pan", "pot")
CUTLERY = ("fork", "spoon", "spatula")
SHAKERS = ("saltshaker", "peppershaker")
SMALL = ("pen", "pencil", "watch", "keychain", "creditcard", "cellphone", "cd")
LARGE = ("book", "laptop", "pillow", "newspaper", "alarmclock", "box")

# What a thing can become; ALFWorld's domain asks for it before the act.
CLEANABLE = frozenset((*VESSELS, *PANS, *CUTLERY, "apple", "tomato", "potato", "egg", "lettuce"))
HEATABLE = frozenset(("apple", "tomato", "potato", "egg", "bread", "mug", "cup", "plate"))
COOLABLE = frozenset((*FOOD, *VESSELS, *PANS))
ABLE = {"clean": CLEANABLE, "heat": HEATABLE, "cool": COOLABLE}
LAMP = "desklamp"


@dataclass(frozen=True, slots=True)
class PlaceKind:
    """One kind of place: what may lie there, whether it has a door, and how many of it a room has at most."""

    holds: tuple[str, ...]
    is_openable: bool = False
    count_max: int = 1


KITCHEN: dict[str, PlaceKind] = {
    "countertop": PlaceKind((*FOOD, *VESSELS, *PANS, *CUTLERY, *SHAKERS), count_max=2),
    "diningtable": PlaceKind((*FOOD, *VESSELS, *PANS, *CUTLERY, *SHAKERS)),
    "cabinet": PlaceKind((*VESSELS, *PANS, *SHAKERS), is_openable=True, count_max=4),
    "drawer": PlaceKind((*CUTLERY, *SHAKERS), is_openable=True, count_max=3),
    "shelf": PlaceKind((*VESSELS, *SHAKERS), count_max=2),
    "fridge": PlaceKind((*FOOD, *VESSELS, *PANS), is_openable=True),
    "microwave": PlaceKind(("apple", "tomato", "potato", "egg", "bread", "mug", "cup", "plate"), is_openable=True),
    "sinkbasin": PlaceKind((*VESSELS, *PANS, *CUTLERY, "apple", "tomato", "potato", "egg", "lettuce")),
    "stoveburner": PlaceKind(PANS, count_max=2),
    "coffeemachine": PlaceKind(("mug",)),
    "garbagecan": PlaceKind(FOOD),
}
BEDROOM: dict[str, PlaceKind] = {
    "desk": PlaceKind((*SMALL, *LARGE, "mug"), count_max=2),
    "sidetable": PlaceKind((*SMALL, *LARGE, "mug"), count_max=2),
    "dresser": PlaceKind((*SMALL, "book", "alarmclock", "box")),
    "drawer": PlaceKind((*SMALL, "book", "newspaper"), is_openable=True, count_max=4),
    "cabinet": PlaceKind(("book", "box", "cd"), is_openable=True, count_max=2),
    "shelf": PlaceKind((*SMALL, "book", "alarmclock", "box"), count_max=3),
    "bed": PlaceKind(("book", "laptop", "pillow", "cellphone", "newspaper")),
    "armchair": PlaceKind(("pillow", "newspaper", "box", "laptop")),
    "safe": PlaceKind(("cd", "creditcard", "keychain", "watch"), is_openable=True),
}
ROOMS = {"kitchen": KITCHEN, "bedroom": BEDROOM}
LAMP_PLACES = ("desk", "sidetable", "dresser")


@dataclass(frozen=True, slots=True)
class Thing:
    """One thing: `kind` is its name without the number, `at` the name of the place where it lies at first."""

    name: str
    kind: str
    at: str


@dataclass(frozen=True, slots=True)
class Household:
    """A room with a task: what stands in it, and what lies there at first."""

    kind: str
    task: str
    places: dict[str, str]  # name -> kind, such as "cabinet 2" -> "cabinet"
    openable: frozenset[str]
    things: tuple[Thing, ...]
    target: str  # the kind of thing that the task is about
    goal: str  # the kind of place that it belongs to; the lamp's place in `light`


def draw_household(seed: int, kinds: tuple[str, ...], places: int = 7, things: int = 8) -> Household:
    """Return the household of this seed: a task of one of these kinds, in a room of that many places and things."""
    dice, numbers = random.Random(f"household/{seed}"), Counter[str]()

    def numbered(kind: str) -> str:
        numbers[kind] += 1
        return f"{kind} {numbers[kind]}"

    kind = dice.choice(kinds)
    name = "kitchen" if kind in TOOLS else "bedroom" if kind == "light" else dice.choice(sorted(ROOMS))
    room = ROOMS[name]
    holders = {
        thing: [name for name, place in room.items() if thing in place.holds]
        for thing in sorted({thing for place in room.values() for thing in place.holds})
    }
    target, goal = _draw_task(dice, kind, holders)
    source = dice.choice([holder for holder in holders[target] if holder != goal])

    needed = list(dict.fromkeys(place for place in (goal, source, TOOLS.get(kind)) if place is not None))
    spare = [each for each, place in room.items() for _ in range(place.count_max - (each in needed))]
    dice.shuffle(spare)
    names = sorted(numbered(each) for each in needed + spare[: max(0, places - len(needed))])
    where = {name: name.rpartition(" ")[0] for name in names}

    drawn = []
    copies = 2 if kind == "two" else 1
    for _ in range(copies):
        at = dice.choice([name for name, place in where.items() if place in holders[target] and place != goal])
        drawn.append(Thing(numbered(target), target, at))
    if kind == "light":
        drawn.append(Thing(numbered(LAMP), LAMP, next(name for name, place in where.items() if place == goal)))
    for _ in range(things - copies):  # none of the target's kind, so that the target must be looked for
        at = dice.choice(list(where))
        if others := [thing for thing in room[where[at]].holds if thing != target]:
            other = dice.choice(others)
            drawn.append(Thing(numbered(other), other, at))
    openable = frozenset(name for name, place in where.items() if room[place].is_openable)
    task = TASKS[kind].format(thing=target, goal=goal)
    return Household(kind, task, where, openable, tuple(drawn), target, goal)


def _draw_task(dice: random.Random, kind: str, holders: dict[str, list[str]]) -> tuple[str, str]:
    """Return a thing that can become what is asked, and a kind of place for it that is not the only one."""
    able = ABLE.get(kind, holders.keys())
    count_min = 2 + (kind in TOOLS)
    target = dice.choice([thing for thing in holders if thing in able and len(holders[thing]) >= count_min])
    if kind == "light":
        return target, dice.choice(LAMP_PLACES)
    return target, dice.choice([holder for holder in holders[target] if holder != TOOLS.get(kind)])


# PDDL


def problem(household: Household) -> str:
    """Return the household as a problem of ALFWorld's domain."""
    room = next(room for room in ROOMS.values() if set(household.places.values()) <= set(room))
    # Types that the domain itself names exist even if the room has none of them.
    place_kinds = sorted({*household.places.values(), *TOOLS.values()})
    thing_kinds = sorted({thing.kind for thing in household.things} | {LAMP, "knife", "butterknife"})
    lines = [
        "(define (problem household) (:domain alfred)",
        "(:objects agent1 - agent",
        " ".join(f"loc_{number}" for number in range(len(household.places) + 1)) + " - location",
        " ".join(map(_id, household.places)) + " - receptacle",
        " ".join(_id(thing.name) for thing in household.things) + " - object",
        " ".join(map(_type, place_kinds)) + " - rtype",
        " ".join(map(_type, thing_kinds)) + " - otype",
        ")",
        "(:init (= (total-cost) 0) (atLocation agent1 loc_0)",
        *_init(household, room),
        ")",
        f"(:goal {_goal(household)})",
        "(:metric minimize (total-cost)))",
    ]
    return "\n".join(lines)


def _init(household: Household, room: dict[str, PlaceKind]) -> list[str]:
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
        abilities = ["pickupable", *(f"{verb}able" for verb, kinds in ABLE.items() if thing.kind in kinds)]
        lines += [f"({ability} {name})" for ability in (["toggleable"] if thing.kind == LAMP else abilities)]
    kinds = sorted({thing.kind for thing in household.things} - {LAMP})
    for place in sorted(set(household.places.values())):
        lines += [f"(canContain {_type(place)} {_type(kind)})" for kind in kinds if kind in room[place].holds]
    return lines


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
