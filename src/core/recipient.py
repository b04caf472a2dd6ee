"""What a recipient wants: no pushes at all, none at night, none too late. Looked at anew at each claim."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

# After the quiet hours' end, so that a city does not wake in one second.
WAKING_SECONDS = 60.0

_DAY, _SECOND = timedelta(days=1), timedelta(seconds=1)

# Whatever else stands there must not be looked for as a file and a module: a name of a thousand parts is imported one
# part within the other, until the stack ends, and the drain with it. The longest there is has 32 characters.
_ZONE_NAME = re.compile(r"[A-Za-z0-9_+-]{1,64}(/[A-Za-z0-9_+-]{1,64}){0,3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipient:
    """A row of recipient. The quiet hours are seconds since local midnight, and may reach over the next one."""

    push_enabled: bool
    time_zone: str
    quiet_from: int | None
    quiet_until: int | None


class BadTimeZone(Exception):  # noqa: N818  the name says what is so
    """The zone is none that the time zone database knows. Names it."""


def quiet_until(recipient: Recipient, now: datetime) -> datetime | None:
    """Say when the quiet hours that hold `now` end, or None if none do.

    It is the first moment at which the recipient's own clock shows a time outside of them, whatever daylight saving
    does to it: an end that the clock jumps over has come with the jump, and one that comes twice comes twice.

    That is never more than a day away, and what the clock is put back by meanwhile (an hour, nearly everywhere). Only
    where the clock jumps over all that the quiet hours leave free of a day, it is a day more. Where both ends are one
    there are no quiet hours, from 00:00 to 24:00 neither: who never wants a push says so by `push_enabled`.
    """
    if recipient.quiet_from is None or recipient.quiet_until is None:
        return None
    begins, ends = timedelta(seconds=recipient.quiet_from), timedelta(seconds=recipient.quiet_until)
    zone = _zone(recipient.time_zone)
    now = moment = now.astimezone(UTC)
    # All in the circle of a day: over midnight, and 24:00, which Postgres knows and a clock does not show.
    while ((shown := _shown(moment, zone)) - begins) % _DAY < (ends - begins) % _DAY:
        moment = _steady_until(moment, moment + (ends - shown) % _DAY, zone)
    return moment if moment > now else None


def _shown(moment: datetime, zone: ZoneInfo) -> timedelta:
    """Give what a clock there shows, as the time since midnight."""
    clock = moment.astimezone(zone)
    return timedelta(hours=clock.hour, minutes=clock.minute, seconds=clock.second, microseconds=clock.microsecond)


def _steady_until(moment: datetime, end: datetime, zone: ZoneInfo) -> datetime:
    """Find where the clock is changed before `end`, or else give the end."""
    offset = moment.astimezone(zone).utcoffset()
    if end.astimezone(zone).utcoffset() == offset:
        return end
    while end - moment > _SECOND:
        middle = moment + (end - moment) / 2
        if middle.astimezone(zone).utcoffset() == offset:
            moment = middle
        else:
            end = middle
    return end.replace(microsecond=0)  # clocks are changed on the second


@lru_cache(maxsize=1024)
def _zone(name: str) -> ZoneInfo:
    if not _ZONE_NAME.fullmatch(name):
        raise BadTimeZone(name)
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError) as fault:  # unknown, a folder, or a file that is something else
        raise BadTimeZone(name) from fault
