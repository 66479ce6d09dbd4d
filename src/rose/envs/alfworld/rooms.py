"""What stands in a room, and what may lie on it: the tables that households are drawn from.

Words are those of ALFWorld, in its lower case. A *place* is a receptacle (it never moves), a *thing* is an object that
can be carried. The short lists keep rooms plausible: nobody looks for a pillow in the fridge.
"""

from __future__ import annotations

from dataclasses import dataclass

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
LAMP = "desklamp"


@dataclass(frozen=True, slots=True)
class Place:
    """One kind of place: what may lie there, whether it has a door, and how many of it a room has at most."""

    holds: tuple[str, ...]
    is_openable: bool = False
    count_max: int = 1


KITCHEN: dict[str, Place] = {
    "countertop": Place((*FOOD, *VESSELS, *PANS, *CUTLERY, *SHAKERS), count_max=2),
    "diningtable": Place((*FOOD, *VESSELS, *PANS, *CUTLERY, *SHAKERS)),
    "cabinet": Place((*VESSELS, *PANS, *SHAKERS), is_openable=True, count_max=4),
    "drawer": Place((*CUTLERY, *SHAKERS), is_openable=True, count_max=3),
    "shelf": Place((*VESSELS, *SHAKERS), count_max=2),
    "fridge": Place((*FOOD, *VESSELS, *PANS), is_openable=True),
    "microwave": Place(("apple", "tomato", "potato", "egg", "bread", "mug", "cup", "plate"), is_openable=True),
    "sinkbasin": Place((*VESSELS, *PANS, *CUTLERY, "apple", "tomato", "potato", "egg", "lettuce")),
    "stoveburner": Place(PANS, count_max=2),
    "coffeemachine": Place(("mug",)),
    "garbagecan": Place(FOOD),
}
BEDROOM: dict[str, Place] = {
    "desk": Place((*SMALL, *LARGE, "mug"), count_max=2),
    "sidetable": Place((*SMALL, *LARGE, "mug"), count_max=2),
    "dresser": Place((*SMALL, "book", "alarmclock", "box")),
    "drawer": Place((*SMALL, "book", "newspaper"), is_openable=True, count_max=4),
    "cabinet": Place(("book", "box", "cd"), is_openable=True, count_max=2),
    "shelf": Place((*SMALL, "book", "alarmclock", "box"), count_max=3),
    "bed": Place(("book", "laptop", "pillow", "cellphone", "newspaper")),
    "armchair": Place(("pillow", "newspaper", "box", "laptop")),
    "safe": Place(("cd", "creditcard", "keychain", "watch"), is_openable=True),
}
ROOMS = {"kitchen": KITCHEN, "bedroom": BEDROOM}
LAMP_PLACES = ("desk", "sidetable", "dresser")


def things_of(room: dict[str, Place]) -> list[str]:
    """Everything that may lie somewhere in this room."""
    return sorted({thing for place in room.values() for thing in place.holds})
