"""Cities, and how long a packet takes between them: great circles, light in glass, bent ways."""

from __future__ import annotations

import math
from dataclasses import dataclass

EARTH_KM = 6371.0
GLASS_KM_PER_MS = 200.0
DETOUR = 1.5
"""Cables do not follow great circles; about what public latency tables show."""
LAST_MILE_MS = 4.0


@dataclass(frozen=True, slots=True)
class City:
    name: str
    north: float
    east: float
    crowd: float
    """Relative number of people who ask from here."""


# fmt: off
CITIES = tuple(City(*one) for one in (
    ("new-york", 40.7, -74.0, 20), ("los-angeles", 34.1, -118.2, 13), ("chicago", 41.9, -87.6, 9),
    ("dallas", 32.8, -96.8, 8), ("miami", 25.8, -80.2, 6), ("toronto", 43.7, -79.4, 6),
    ("seattle", 47.6, -122.3, 4), ("mexico-city", 19.4, -99.1, 22), ("bogota", 4.7, -74.1, 11),
    ("lima", -12.0, -77.0, 11), ("sao-paulo", -23.6, -46.6, 22), ("buenos-aires", -34.6, -58.4, 15),
    ("santiago", -33.4, -70.7, 7), ("london", 51.5, -0.1, 14), ("paris", 48.9, 2.4, 11),
    ("madrid", 40.4, -3.7, 7), ("amsterdam", 52.4, 4.9, 3), ("frankfurt", 50.1, 8.7, 3),
    ("milan", 45.5, 9.2, 4), ("warsaw", 52.2, 21.0, 3), ("stockholm", 59.3, 18.1, 2),
    ("istanbul", 41.0, 29.0, 15), ("cairo", 30.0, 31.2, 21), ("lagos", 6.5, 3.4, 15),
    ("nairobi", -1.3, 36.8, 5), ("johannesburg", -26.2, 28.0, 6), ("dubai", 25.2, 55.3, 3),
    ("mumbai", 19.1, 72.9, 21), ("delhi", 28.6, 77.2, 32), ("bangalore", 13.0, 77.6, 13),
    ("singapore", 1.4, 103.8, 6), ("jakarta", -6.2, 106.8, 11), ("bangkok", 13.8, 100.5, 11),
    ("manila", 14.6, 121.0, 14), ("hong-kong", 22.3, 114.2, 7), ("taipei", 25.0, 121.6, 7),
    ("seoul", 37.6, 127.0, 10), ("tokyo", 35.7, 139.7, 37), ("osaka", 34.7, 135.5, 19),
    ("sydney", -33.9, 151.2, 5), ("melbourne", -37.8, 145.0, 5), ("auckland", -36.8, 174.8, 2),
))
SITES = tuple(City(*one, 1) for one in (
    ("virginia", 39.0, -77.5), ("oregon", 45.6, -121.2), ("dublin", 53.3, -6.3),
    ("frankfurt", 50.1, 8.7), ("tokyo", 35.7, 139.7), ("singapore", 1.4, 103.8),
    ("sao-paulo", -23.6, -46.6), ("sydney", -33.9, 151.2), ("ohio", 40.0, -83.0),
    ("mumbai", 19.1, 72.9), ("london", 51.5, -0.1), ("seoul", 37.6, 127.0), ("paris", 48.9, 2.4),
    ("california", 37.4, -122.1), ("hong-kong", 22.3, 114.2), ("montreal", 45.5, -73.6),
    ("stockholm", 59.3, 18.1), ("johannesburg", -26.2, 28.0), ("dallas", 32.8, -96.8),
    ("dubai", 25.2, 55.3),
))
# fmt: on


def round_trip_s(one: City, other: City) -> float:
    return (LAST_MILE_MS + 2 * DETOUR * _km(one, other) / GLASS_KM_PER_MS) / 1000.0


def _km(one: City, other: City) -> float:
    a, b = math.radians(one.north), math.radians(other.north)
    across = math.radians(other.east - one.east)
    cosine = math.sin(a) * math.sin(b) + math.cos(a) * math.cos(b) * math.cos(across)
    return EARTH_KM * math.acos(max(-1.0, min(1.0, cosine)))
