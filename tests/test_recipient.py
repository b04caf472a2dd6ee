import secrets
import zoneinfo
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import psycopg
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from core.recipient import BadTimeZone, Recipient, quiet_until

DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)
NIGHT = ("22:00", "07:00")

# Names that end in no zone: unknown, a folder, a file that is something else, a way out of the folder, no name for a
# file at all.
HOSTILE = [
    "", " ", ".", "..", "Mars/Olympus_Mons", "Europe", "Europe/", "/Europe/Berlin", "Europe//Berlin", "Europe/Berlin/x",
    "Europe/Berlin ", " Europe/Berlin", "Europe/Berlin\n", "Europe.Berlin", "Europe\\Berlin", "zone.tab", "tzdata.zi",
    "../zoneinfo/Europe/Berlin", "Europe/../Europe/Berlin", "/etc/passwd", "../../../etc/passwd", "C:/Windows",
    "a" * 300, "a/" * 3000 + "b", "a" * 100_000, "Europe/Köln", "\N{PILE OF POO}", "\0", "Europe/Berlin\0", "\ud800",
    "+02:00", "UTC+2", "CET-1CEST,M3.5.0,M10.5.0/3", "<+0330>-3:30", "%s%n", "'; DROP TABLE recipient; --",
]  # fmt: skip

zones = st.sampled_from(sorted(zoneinfo.available_timezones()))
instants = st.datetimes(datetime(1970, 1, 2), datetime(2037, 12, 29), timezones=st.just(UTC))  # noqa: DTZ001  in UTC
seconds = st.integers(0, 24 * 3600)  # 24:00 is a time of day to Postgres


def at(clock: str) -> int:
    hours, minutes = clock.split(":")
    return int(hours) * 3600 + int(minutes) * 60


def a_recipient(zone: str, quiet: tuple[str, str]) -> Recipient:
    begins, ends = quiet
    return Recipient(push_enabled=True, time_zone=zone, quiet_from=at(begins), quiet_until=at(ends))


def local(zone: str, text: str, *, fold: int = 0) -> datetime:
    """Read what a clock there shows. Of an hour that comes twice `fold` says which."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).astimezone(UTC)


def shown(instant: datetime | None, zone: str) -> str | None:
    return None if instant is None else instant.astimezone(ZoneInfo(zone)).isoformat(" ")


@pytest.mark.parametrize(
    ("quiet", "now", "until"),
    [
        pytest.param(("13:00", "15:00"), "12:59:59.999999", None, id="before it begins"),
        pytest.param(("13:00", "15:00"), "13:00:00", "2026-06-10 15:00:00+02:00", id="at its begin"),
        pytest.param(("13:00", "15:00"), "14:59:59.999999", "2026-06-10 15:00:00+02:00", id="just before its end"),
        pytest.param(("13:00", "15:00"), "15:00:00", None, id="at its end"),
        pytest.param(NIGHT, "21:59:59.999999", None, id="before the night"),
        pytest.param(NIGHT, "22:00:00", "2026-06-11 07:00:00+02:00", id="at its begin in the evening"),
        pytest.param(NIGHT, "23:59:59.999999", "2026-06-11 07:00:00+02:00", id="before midnight"),
        pytest.param(NIGHT, "00:00:00", "2026-06-10 07:00:00+02:00", id="at midnight"),
        pytest.param(NIGHT, "06:59:59.999999", "2026-06-10 07:00:00+02:00", id="just before its end in the morning"),
        pytest.param(NIGHT, "07:00:00", None, id="at its end in the morning"),
        pytest.param(NIGHT, "12:00:00", None, id="at noon"),
        pytest.param(("00:00", "06:00"), "00:00:00", "2026-06-10 06:00:00+02:00", id="from midnight on"),
        pytest.param(("00:00", "06:00"), "23:59:59", None, id="the evening before"),
        pytest.param(("22:00", "00:00"), "23:00:00", "2026-06-11 00:00:00+02:00", id="until midnight"),
        pytest.param(("22:00", "00:00"), "00:00:00", None, id="midnight is its end"),
        pytest.param(("22:00", "24:00"), "23:00:00", "2026-06-11 00:00:00+02:00", id="until 24:00"),
        pytest.param(("22:00", "24:00"), "00:00:00", None, id="24:00 is its end"),
        pytest.param(("24:00", "06:00"), "01:00:00", "2026-06-10 06:00:00+02:00", id="from 24:00 on"),
        pytest.param(("24:00", "06:00"), "23:00:00", None, id="24:00 is not yet"),
        pytest.param(("12:00", "12:00"), "12:00:00", None, id="both ends are one"),
        pytest.param(("00:00", "24:00"), "12:00:00", None, id="both ends are one midnight"),
        pytest.param(("12:01", "12:00"), "12:01:00", "2026-06-11 12:00:00+02:00", id="all but a minute"),
        pytest.param(("12:01", "12:00"), "12:00:59", None, id="the minute"),
    ],
)
def test_quiet_hours_end_at_their_end_by_the_recipients_clock(
    quiet: tuple[str, str], now: str, until: str | None
) -> None:
    moment = local("Europe/Berlin", f"2026-06-10T{now}")

    assert shown(quiet_until(a_recipient("Europe/Berlin", quiet), moment), "Europe/Berlin") == until


def test_whoever_named_no_quiet_hours_has_none_and_no_zone_is_looked_at() -> None:
    recipient = Recipient(push_enabled=True, time_zone="Mars/Olympus_Mons", quiet_from=None, quiet_until=None)

    assert quiet_until(recipient, datetime(2026, 6, 10, 3, tzinfo=UTC)) is None


def test_the_instant_may_be_given_in_any_zone() -> None:
    recipient = a_recipient("Asia/Tokyo", NIGHT)
    now = local("Asia/Tokyo", "2026-06-10T23:00")

    ends = {
        quiet_until(recipient, now.astimezone(ZoneInfo(zone))) for zone in ("UTC", "America/New_York", "Asia/Tokyo")
    }

    assert ends == {local("Asia/Tokyo", "2026-06-11T07:00")}


# The night of each change: what the clock shows when it is looked at, and when the quiet hours end.
@pytest.mark.parametrize(
    ("zone", "quiet", "now", "until", "hours"),
    [
        # The night is an hour shorter, or longer.
        ("Europe/Berlin", NIGHT, "2026-03-28T23:00", "2026-03-29 07:00:00+02:00", 7),
        ("Europe/Berlin", NIGHT, "2026-10-24T23:00", "2026-10-25 07:00:00+01:00", 9),
        ("America/New_York", NIGHT, "2026-03-07T23:00", "2026-03-08 07:00:00-04:00", 7),
        ("America/New_York", NIGHT, "2026-10-31T23:00", "2026-11-01 07:00:00-05:00", 9),
        ("Australia/Lord_Howe", NIGHT, "2026-10-03T23:00", "2026-10-04 07:00:00+11:00", 7.5),
        ("Australia/Lord_Howe", NIGHT, "2026-04-04T23:00", "2026-04-05 07:00:00+10:30", 8.5),
        # Their end is in the hour that does not exist: with the jump it has come.
        ("Europe/Berlin", ("22:00", "02:30"), "2026-03-29T01:45", "2026-03-29 03:00:00+02:00", 0.25),
        ("Europe/Berlin", ("22:00", "02:00"), "2026-03-29T01:45", "2026-03-29 03:00:00+02:00", 0.25),
        ("Europe/Berlin", ("22:00", "03:00"), "2026-03-29T01:45", "2026-03-29 03:00:00+02:00", 0.25),
        ("America/New_York", ("22:00", "02:30"), "2026-03-08T01:45", "2026-03-08 03:00:00-04:00", 0.25),
        ("Australia/Lord_Howe", ("22:00", "02:15"), "2026-10-04T01:45", "2026-10-04 02:30:00+11:00", 0.25),
        ("America/Havana", ("22:00", "00:30"), "2026-03-07T23:45", "2026-03-08 01:00:00-04:00", 0.25),
        # So is their begin: they begin with the jump.
        ("Europe/Berlin", ("02:30", "07:00"), "2026-03-29T03:00", "2026-03-29 07:00:00+02:00", 4),
        ("Europe/Berlin", ("02:30", "07:00"), "2026-03-29T01:59", None, None),
        # All of them are in it, and do not come about; they are the whole of it, and neither.
        ("Europe/Berlin", ("02:15", "02:45"), "2026-03-29T01:59:59", None, None),
        ("Europe/Berlin", ("02:15", "02:45"), "2026-03-29T03:00", None, None),
        # All that they leave free is in it: then it is the next day's.
        ("Europe/Berlin", ("02:45", "02:15"), "2026-03-29T01:45", "2026-03-30 02:15:00+02:00", 23.5),
        ("Europe/Berlin", ("02:45", "02:15"), "2026-03-28T02:45", "2026-03-30 02:15:00+02:00", 46.5),
        # Little enough is left free that an end taken from before the jump would be inside of them.
        ("Europe/Berlin", ("03:15", "02:30"), "2026-03-29T01:45", "2026-03-29 03:00:00+02:00", 0.25),
        # Their end is in the hour that comes twice, and so it comes twice.
        ("Europe/Berlin", ("22:00", "02:30"), "2026-10-25T02:15", "2026-10-25 02:30:00+02:00", 0.25),
        ("Europe/Berlin", ("22:00", "02:30"), "2026-10-25T02:45", None, None),
        ("Europe/Berlin", ("22:00", "02:30"), "2026-10-25T02:15 again", "2026-10-25 02:30:00+01:00", 0.25),
        ("Europe/Berlin", ("22:00", "02:30"), "2026-10-25T02:45 again", None, None),
        ("America/New_York", ("22:00", "01:30"), "2026-11-01T01:15", "2026-11-01 01:30:00-04:00", 0.25),
        ("America/New_York", ("22:00", "01:30"), "2026-11-01T01:15 again", "2026-11-01 01:30:00-05:00", 0.25),
        ("Australia/Lord_Howe", ("22:00", "01:45"), "2026-04-05T01:40", "2026-04-05 01:45:00+11:00", 1 / 12),
        ("Australia/Lord_Howe", ("22:00", "01:45"), "2026-04-05T01:40 again", "2026-04-05 01:45:00+10:30", 1 / 12),
        # They begin in it, and are left once more when it begins again.
        ("Europe/Berlin", ("02:30", "07:00"), "2026-10-25T02:45", "2026-10-25 02:00:00+01:00", 0.25),
        ("Europe/Berlin", ("02:30", "07:00"), "2026-10-25T02:15 again", None, None),
        ("Europe/Berlin", ("02:30", "07:00"), "2026-10-25T02:45 again", "2026-10-25 07:00:00+01:00", 4.25),
        # The clock goes back over midnight, to yesterday.
        ("America/Havana", ("22:00", "00:30"), "2025-11-02T00:15", "2025-11-02 00:30:00-04:00", 0.25),
        ("America/Havana", ("22:00", "00:30"), "2025-11-02T00:15 again", "2025-11-02 00:30:00-05:00", 0.25),
        ("America/Sao_Paulo", ("22:00", "24:00"), "2018-02-17T23:30", "2018-02-18 00:00:00-03:00", 1.5),
        ("America/Sao_Paulo", ("22:00", "24:00"), "2018-02-17T23:30 again", "2018-02-18 00:00:00-03:00", 0.5),
        # Odd offsets.
        ("Asia/Kathmandu", NIGHT, "2026-06-10T23:00", "2026-06-11 07:00:00+05:45", 8),
        ("Pacific/Chatham", NIGHT, "2026-06-10T23:00", "2026-06-11 07:00:00+12:45", 8),
        ("Pacific/Chatham", NIGHT, "2026-09-26T23:00", "2026-09-27 07:00:00+13:45", 7),
        ("Pacific/Chatham", ("22:00", "03:15"), "2026-09-27T02:30", "2026-09-27 03:45:00+13:45", 0.25),
        ("Pacific/Chatham", NIGHT, "2026-04-04T23:00", "2026-04-05 07:00:00+12:45", 9),
        ("Pacific/Kiritimati", NIGHT, "2026-06-10T23:00", "2026-06-11 07:00:00+14:00", 8),
        ("Etc/GMT+12", NIGHT, "2026-06-10T23:00", "2026-06-11 07:00:00-12:00", 8),
        # Until 1972 Liberia was 44 minutes and 30 seconds behind.
        ("Africa/Monrovia", NIGHT, "1971-06-10T23:00", "1971-06-11 07:00:00-00:44:30", 8),
        ("Africa/Monrovia", ("22:00", "00:30"), "1972-01-06T23:59", "1972-01-07 00:44:30+00:00", 1 / 60),
        # Samoa had no 30 December 2011, and Kwajalein no 21 August 1993.
        ("Pacific/Apia", NIGHT, "2011-12-29T23:00", "2011-12-31 07:00:00+14:00", 8),
        ("Pacific/Apia", ("12:00", "11:00"), "2011-12-29T12:00", "2011-12-31 11:00:00+14:00", 23),
        ("Pacific/Apia", ("23:00", "24:00"), "2011-12-29T23:30", "2011-12-31 00:00:00+14:00", 0.5),
        ("Pacific/Kwajalein", NIGHT, "1993-08-20T23:00", "1993-08-22 07:00:00+12:00", 8),
        # Morocco puts the clock back for Ramadan, and forward after it.
        ("Africa/Casablanca", NIGHT, "2026-02-14T23:00", "2026-02-15 07:00:00+00:00", 9),
        ("Africa/Casablanca", NIGHT, "2026-03-21T23:00", "2026-03-22 07:00:00+01:00", 7),
        ("Africa/El_Aaiun", ("22:00", "02:30"), "2026-02-15T02:15", "2026-02-15 02:30:00+01:00", 0.25),
        ("Africa/El_Aaiun", ("22:00", "02:30"), "2026-02-15T02:15 again", "2026-02-15 02:30:00+00:00", 0.25),
        ("Africa/El_Aaiun", ("22:00", "02:30"), "2026-03-22T01:45", "2026-03-22 03:00:00+01:00", 0.25),
        # Ireland's winter is the exception by its law, and Troll changes by two hours.
        ("Europe/Dublin", NIGHT, "2026-10-24T23:00", "2026-10-25 07:00:00+00:00", 9),
        ("Antarctica/Troll", NIGHT, "2026-10-24T23:00", "2026-10-25 07:00:00+00:00", 10),
    ],
)  # fmt: skip
def test_whatever_is_done_to_the_clock_quiet_hours_end_by_what_it_shows(
    zone: str, quiet: tuple[str, str], now: str, until: str | None, hours: float | None
) -> None:
    moment = local(zone, now.removesuffix(" again"), fold=int(now.endswith(" again")))

    end = quiet_until(a_recipient(zone, quiet), moment)

    assert shown(end, zone) == until
    assert hours == (None if end is None else (end - moment) / HOUR)


def offsets(zone: str, begins: datetime, ends: datetime) -> Iterator[timedelta]:
    while begins <= ends:
        offset = begins.astimezone(ZoneInfo(zone)).utcoffset()
        assert offset is not None
        yield offset
        begins += HOUR / 2


def is_quiet(zone: str, begins: int, ends: int, moment: datetime) -> bool:
    """Say so in other words than the code does: forward from the window's begin, or around midnight."""
    clock = moment.astimezone(ZoneInfo(zone)).time()
    now = clock.hour * 3600 + clock.minute * 60 + clock.second + clock.microsecond / 1e6
    begins, ends = begins % 86_400, ends % 86_400
    return begins <= now < ends if begins <= ends else now >= begins or now < ends


@settings(max_examples=500)
@given(zone=zones, now=instants, begins=seconds, ends=seconds)
@example("Europe/Berlin", datetime(2026, 3, 29, 0, 45, tzinfo=UTC), at("03:15"), at("02:30"))
@example("Europe/Berlin", datetime(2026, 3, 29, 0, 45, tzinfo=UTC), at("02:45"), at("02:15"))
@example("Pacific/Apia", datetime(2011, 12, 30, 9, 30, tzinfo=UTC), at("22:00"), at("07:00"))
@example("Antarctica/Troll", datetime(2026, 10, 25, 0, 0, 0, 1, tzinfo=UTC), at("02:01"), at("02:00"))
@example("Africa/Monrovia", datetime(1972, 1, 7, 0, 44, 29, 999_999, tzinfo=UTC), at("22:00"), at("00:30"))
@example("UTC", datetime(2026, 1, 1, tzinfo=UTC), at("00:00"), at("24:00"))
def test_quiet_hours_end_later_outside_of_them_soon_and_once(zone: str, now: datetime, begins: int, ends: int) -> None:
    recipient = Recipient(push_enabled=True, time_zone=zone, quiet_from=begins, quiet_until=ends)

    end = quiet_until(recipient, now)

    assert (end is not None) == is_quiet(zone, begins, ends, now)
    if end is None:
        return
    assert end > now
    assert not is_quiet(zone, begins, ends, end)
    assert quiet_until(recipient, end) is None  # who asks again at that moment is not put off again
    # The clock is changed at most once in three days. What it jumps over is awake time that is missing.
    seen = list(offsets(zone, now, now + 3 * DAY))
    back = max(seen[0] - each for each in seen)
    forward = max(each - seen[0] for each in seen)
    awake = timedelta(seconds=(begins - ends) % 86_400)
    if awake > forward:
        assert end - now <= DAY + back
        assert back > HOUR or end - now <= DAY + HOUR
    else:
        assert end - now <= 2 * DAY


@settings(max_examples=150, deadline=None)
@given(
    zone=zones,
    now=st.datetimes(datetime(1973, 1, 1), datetime(2037, 12, 29), timezones=st.just(UTC)),  # noqa: DTZ001  in UTC
    begins=st.integers(0, 24 * 60),
    ends=st.integers(0, 24 * 60),
)
@example("America/Sao_Paulo", datetime(2018, 2, 18, 1, 45, tzinfo=UTC), at("23:30") // 60, 0)
@example("Europe/Berlin", datetime(2026, 10, 25, 0, 45, tzinfo=UTC), at("02:30") // 60, at("07:00") // 60)
@example("Europe/Berlin", datetime(2026, 3, 28, 2, 0, tzinfo=UTC), at("02:45") // 60, at("02:15") // 60)
def test_they_end_at_the_first_minute_that_the_clock_shows_a_time_outside_of_them(
    zone: str, now: datetime, begins: int, ends: int
) -> None:
    """Found minute by minute. Since 1973 every clock is changed on the minute."""
    now = now.replace(second=0, microsecond=0)
    assume(is_quiet(zone, begins * 60, ends * 60, now))
    first = now
    while is_quiet(zone, begins * 60, ends * 60, first):
        first += MINUTE

    recipient = Recipient(push_enabled=True, time_zone=zone, quiet_from=begins * 60, quiet_until=ends * 60)

    assert quiet_until(recipient, now) == first


@settings(max_examples=300)
@given(zone=zones, now=instants, begins=seconds, ends=seconds, later=st.floats(0, 1))
def test_looked_at_later_they_still_end_at_the_same_moment(
    zone: str, now: datetime, begins: int, ends: int, later: float
) -> None:
    """So that a delivery which is claimed once more meanwhile is put off no further."""
    recipient = Recipient(push_enabled=True, time_zone=zone, quiet_from=begins, quiet_until=ends)
    end = quiet_until(recipient, now)
    assume(end)
    assert end is not None
    meanwhile = now + (end - now) * later
    assume(meanwhile < end)

    assert quiet_until(recipient, meanwhile) == end


def test_every_zone_has_nights_all_the_year() -> None:
    moments = [datetime(2026, 1, 1, tzinfo=UTC) + n * 18 * HOUR for n in range(366 * 24 // 18)]
    for zone in sorted(zoneinfo.available_timezones()):
        ends = [quiet_until(a_recipient(zone, NIGHT), moment) for moment in moments]

        nights = [is_quiet(zone, at("22:00"), at("07:00"), moment) for moment in moments]
        assert [end is not None for end in ends] == nights, zone
        # No clock anywhere jumps over seven o'clock.
        assert {end.astimezone(ZoneInfo(zone)).time() for end in ends if end is not None} == {time(7)}, zone


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:30]))
def test_a_name_that_is_no_zone_is_said_to_be_none(name: str) -> None:
    with pytest.raises(BadTimeZone) as refused:
        quiet_until(a_recipient(name, NIGHT), datetime(2026, 6, 10, 3, tzinfo=UTC))

    assert refused.value.args == (name,)


@settings(max_examples=300)
@given(
    name=st.text()
    | st.text("./\\ _-+:AaEeBbUuTtCc0129\0\n")
    | st.lists(st.sampled_from(["Europe", "Berlin", "..", ".", "", "posix", "UTC", "Etc", "__init__.py"])).map("/".join)
)
def test_no_name_whatever_brings_anything_else_about(name: str) -> None:
    with suppress(BadTimeZone):
        quiet_until(a_recipient(name, NIGHT), datetime(2026, 6, 10, 3, tzinfo=UTC))


def test_a_bad_zone_is_bad_each_time_and_spoils_no_good_one() -> None:
    now = local("Europe/Berlin", "2026-06-10T23:00")
    for _ in range(2):
        with pytest.raises(BadTimeZone):
            quiet_until(a_recipient("Europe/Nowhere", NIGHT), now)
        assert quiet_until(a_recipient("Europe/Berlin", NIGHT), now) == now + 8 * HOUR


def test_any_number_of_bad_zones_leaves_nothing_behind() -> None:
    for _ in range(2000):
        with pytest.raises(BadTimeZone):
            quiet_until(a_recipient(secrets.token_hex(8), NIGHT), datetime(2026, 6, 10, 3, tzinfo=UTC))

    assert quiet_until(a_recipient("UTC", NIGHT), datetime(2026, 6, 10, 3, tzinfo=UTC)) is not None


def test_every_zone_that_postgres_names_is_one_to_us(db: psycopg.Connection) -> None:
    """Where both agree, what `set_quiet_hours` lets in is never a warning later."""
    names = [
        name
        for (name,) in db.execute(
            # posix/ is all of them once more, right/ counts leap seconds, and the other two are no places.
            "SELECT name FROM pg_timezone_names WHERE name !~ '^(posix/|right/|posixrules$|localtime$)'"
        )
    ]
    now = datetime(2026, 6, 10, 3, tzinfo=UTC)

    bad = []
    for name in names:
        try:
            quiet_until(a_recipient(name, NIGHT), now)
        except BadTimeZone:
            bad.append(name)

    assert len(names) > 400
    assert bad == []
