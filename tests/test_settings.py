import pytest
from psycopg.conninfo import conninfo_to_dict

from core.settings import BadSettings, DatabaseUrl, RdsIam, RdsSecret, Settings, check_lease

URL = "postgresql://drain:pa55@db.example:5432/outbox"
RDS = {"DB_HOST": "db.example", "DB_NAME": "outbox", "DB_USER": "apns_drain"}

# variable, field, default, lowest, highest
WHOLE_NUMBERS = [
    ("DRAIN_BATCH_SIZE", "batch_size", 50, 1, 1000),
    ("DRAIN_MAX_BATCHES", "max_batches", 1, 1, 1000),
    ("LEASE_SECONDS", "lease_seconds", 120, 30, 43_200),
    ("MAX_ATTEMPTS", "max_attempts", 5, 1, 100),
    ("BACKOFF_BASE_SECONDS", "backoff_base_seconds", 60, 1, 86_400),
    ("BACKOFF_CAP_SECONDS", "backoff_cap_seconds", 3600, 1, 604_800),
    ("GIVE_BACK_HOURS", "give_back_hours", 72, 1, 8760),
]


def settings(**env: str) -> Settings:
    return Settings.from_env({"DATABASE_URL": URL} | env)


def faults(env: dict[str, str]) -> str:
    with pytest.raises(BadSettings) as caught:
        Settings.from_env(env)
    return str(caught.value)


def test_a_database_is_all_that_must_be_set() -> None:
    assert settings() == Settings(
        database=DatabaseUrl(URL),
        apns_secret_id=None,
        apns_production_url="https://api.push.apple.com",
        apns_sandbox_url="https://api.sandbox.push.apple.com",
        apns_ca_file=None,
        batch_size=50,
        max_batches=1,
        lease_seconds=120,
        max_attempts=5,
        backoff_base_seconds=60,
        backoff_cap_seconds=3600,
        give_back_hours=72,
    )


def test_every_variable_has_its_field() -> None:
    env = {
        "APNS_SECRET_ID": "apns/key",
        "APNS_PRODUCTION_URL": "https://localhost:2197",
        "APNS_SANDBOX_URL": "https://[::1]:2198",
        "APNS_CA_FILE": "/tmp/ca.pem",  # noqa: S108  never opened
        "DRAIN_BATCH_SIZE": "7",
        "DRAIN_MAX_BATCHES": "8",
        "LEASE_SECONDS": "99",
        "MAX_ATTEMPTS": "3",
        "BACKOFF_BASE_SECONDS": "10",
        "BACKOFF_CAP_SECONDS": "10",
        "GIVE_BACK_HOURS": "24",
    }

    assert settings(**env) == Settings(
        database=DatabaseUrl(URL),
        apns_secret_id="apns/key",
        apns_production_url="https://localhost:2197",
        apns_sandbox_url="https://[::1]:2198",
        apns_ca_file="/tmp/ca.pem",  # noqa: S108  never opened
        batch_size=7,
        max_batches=8,
        lease_seconds=99,
        max_attempts=3,
        backoff_base_seconds=10,
        backoff_cap_seconds=10,
        give_back_hours=24,
    )


def test_blank_is_unset() -> None:
    names = [name for name, *_ in WHOLE_NUMBERS]
    names += ["APNS_SECRET_ID", "APNS_PRODUCTION_URL", "APNS_SANDBOX_URL", "APNS_CA_FILE", "DB_HOST", "DB_AUTH"]

    assert settings(**dict.fromkeys(names, "")) == settings(**dict.fromkeys(names, " \t\n")) == settings()
    assert "set DB_HOST, DB_NAME, DB_USER" in faults({"DATABASE_URL": " "})


@pytest.mark.parametrize(("variable", "field", "default", "low", "high"), WHOLE_NUMBERS)
def test_a_whole_number_has_bounds_and_both_belong_to_it(
    variable: str, field: str, default: int, low: int, high: int
) -> None:
    wide = {"BACKOFF_BASE_SECONDS": "1", "BACKOFF_CAP_SECONDS": "604800"}  # so that neither bounds the other

    assert getattr(settings(), field) == default
    for good in (low, high):
        assert getattr(settings(**wide | {variable: str(good)}), field) == good
    for bad in (low - 1, high + 1):
        assert faults({"DATABASE_URL": URL} | wide | {variable: str(bad)}) == (
            f"{variable} must be a whole number from {low} to {high}, not '{bad}'"
        )


@pytest.mark.parametrize("text", ["50", " 50 ", "050", "50\n"])
def test_a_whole_number_may_have_blanks_around_it_and_noughts_before_it(text: str) -> None:
    assert settings(DRAIN_BATCH_SIZE=text).batch_size == 50


@pytest.mark.parametrize(
    "text",
    [
        *("fifty", "+5", "-1", "0", "1e3", "5.0", "5_0", "0x10", "5 0", "1" * 10),
        *("\uff15\uff10", "\u0665", "\u00b2"),  # digits too, of other scripts
        pytest.param("9" * 5000, id="more digits than int() takes"),
    ],
)
def test_a_whole_number_is_ascii_digits_and_nothing_else(text: str) -> None:
    assert faults({"DATABASE_URL": URL, "DRAIN_BATCH_SIZE": text}) == (
        f"DRAIN_BATCH_SIZE must be a whole number from 1 to 1000, not {text!r}"
    )


def test_one_message_names_every_fault() -> None:
    message = faults(
        {variable: "many" for variable, *_ in WHOLE_NUMBERS}
        | {"APNS_PRODUCTION_URL": "http://apns", "APNS_SANDBOX_URL": "apns", "DB_PORT": "pg", "DB_AUTH": "password"}
        | {"DB_HOST": "db:5432"}
    )

    for variable, *_ in WHOLE_NUMBERS:
        assert f"{variable} must be a whole number from" in message
    assert "APNS_PRODUCTION_URL must be https://host" in message
    assert "APNS_SANDBOX_URL must be https://host" in message
    assert "DB_PORT must be a whole number from 1 to 65535, not 'pg'" in message
    assert "DB_AUTH must be iam or secret, not 'password'" in message
    assert "DB_HOST must be a host's name alone" in message
    assert "set DB_NAME, DB_USER, or DATABASE_URL instead" in message


def test_backoff_cannot_be_capped_below_its_base() -> None:
    message = faults({"DATABASE_URL": URL, "BACKOFF_BASE_SECONDS": "3601"})

    assert message == (
        "BACKOFF_CAP_SECONDS (3600) must not be less than BACKOFF_BASE_SECONDS (3601): raise the cap or lower the base"
    )


def test_a_backoff_that_cannot_be_read_is_not_also_said_to_be_too_short() -> None:
    message = faults({"DATABASE_URL": URL, "BACKOFF_BASE_SECONDS": "3601", "BACKOFF_CAP_SECONDS": "1h"})

    assert message == "BACKOFF_CAP_SECONDS must be a whole number from 1 to 604800, not '1h'"


@pytest.mark.parametrize(
    "url",
    [
        URL,
        "postgres://db.example/outbox",
        "postgresql://",
        "postgresql:///outbox?host=/var/run/postgresql&port=5433",
        "postgresql://%2Fvar%2Frun/outbox",
        "postgresql://u:p%40%25@[::1]:5433/outbox?sslmode=verify-full",
        "postgresql://u:p?#:!@one:5432,two:5433/outbox",
        "postgresql://u@h?application_name=a@b",
    ],
)
def test_a_database_url_is_whatever_libpq_reads(url: str) -> None:
    assert conninfo_to_dict(url) is not None
    assert Settings.from_env({"DATABASE_URL": f" {url}\n"}).database == DatabaseUrl(url)


@pytest.mark.parametrize(
    ("url", "mend"),
    [
        ("mysql://u:hunter2@h/db", "must begin with postgresql://"),
        ("postgresql+psycopg://u:hunter2@h/db", "must begin with postgresql://"),
        ("host=h password=hunter2", "must begin with postgresql://"),
        ("postgresql://u:hunter2%@h/db", "write a % of the password as %25"),
        ("postgresql://u:hunter2%zz@h/db", "write a % of the password as %25"),
        ("postgresql://u:hunter2/x@h/db", "%40 for @"),
        ("postgresql://u:hunter2@x@h/db", "%40 for @"),
        ("postgresql://u:hunter2@[::1/db", "%40 for @"),
        ("postgresql://u:hunter2 x@h/db", "%40 for @"),
        ("postgresql://u:hunter2@h:port/db", "%40 for @"),
    ],
)
def test_a_bad_database_url_is_explained_and_never_shown(url: str, mend: str) -> None:
    message = faults({"DATABASE_URL": url})

    assert message.startswith("DATABASE_URL ")
    assert mend in message
    assert "hunter2" not in message


def test_a_database_url_wins_over_whatever_the_other_variables_say() -> None:
    assert settings(DB_HOST="a:b", DB_PORT="x", DB_AUTH="y").database == DatabaseUrl(URL)


def test_rds_logs_in_by_iam_unless_told_otherwise() -> None:
    iam = RdsIam(host="db.example", port=5432, name="outbox", user="apns_drain")

    assert Settings.from_env(RDS).database == iam
    assert Settings.from_env(RDS | {"DB_AUTH": "iam", "DB_SECRET_ID": "unused"}).database == iam


def test_the_user_of_a_database_secret_is_its_own_unless_named() -> None:
    env = RDS | {"DB_AUTH": "secret", "DB_SECRET_ID": "db/login", "DB_PORT": "6432"}

    assert Settings.from_env(env | {"DB_USER": ""}).database == RdsSecret(
        host="db.example", port=6432, name="outbox", user=None, secret_id="db/login"
    )
    assert Settings.from_env(env).database == RdsSecret(
        host="db.example", port=6432, name="outbox", user="apns_drain", secret_id="db/login"
    )


def test_all_that_is_missing_to_name_the_database_is_named_at_once() -> None:
    assert faults({}) == (
        "the database is not named (DB_AUTH is 'iam'): set DB_HOST, DB_NAME, DB_USER, or DATABASE_URL instead"
    )
    assert faults({"DB_HOST": "h", "DB_AUTH": "secret"}) == (
        "the database is not named (DB_AUTH is 'secret'): set DB_NAME, DB_SECRET_ID, or DATABASE_URL instead"
    )


@pytest.mark.parametrize("host", ["db:5432", "postgresql://db", "u@db", "db one", "db/outbox"])
def test_a_database_host_is_a_name_alone(host: str) -> None:
    assert faults(RDS | {"DB_HOST": host}).startswith("DB_HOST must be a host's name alone")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("https://localhost:2197/", "https://localhost:2197"),
        ("https://apns.internal", "https://apns.internal"),
        ("HTTPS://10.0.0.1:65535", "HTTPS://10.0.0.1:65535"),
        ("https://[::1]:443/", "https://[::1]:443"),
    ],
)
def test_apns_is_a_host_with_perhaps_a_port_and_a_slash(given: str, kept: str) -> None:
    assert settings(APNS_PRODUCTION_URL=given).apns_production_url == kept
    assert settings(APNS_SANDBOX_URL=given).apns_sandbox_url == kept


@pytest.mark.parametrize(
    "url",
    [
        "http://apns.internal",
        "apns.internal",
        "https://",
        "https:///",
        "https://apns.internal/3/device",
        "https://apns.internal//",
        "https://apns.internal?x=hunter2",
        "https://apns.internal#x",
        "https://me:hunter2@apns.internal",
        "https://apns.internal:",
        "https://apns.internal:0",
        "https://apns.internal:65536",
        "https://apns.internal:https",
        "https://apns.in\nternal",
        "https://[::1",
    ],
)
@pytest.mark.parametrize("variable", ["APNS_PRODUCTION_URL", "APNS_SANDBOX_URL"])
def test_anything_else_is_no_apns(variable: str, url: str) -> None:
    message = faults({"DATABASE_URL": URL, variable: url})

    assert message.startswith(f"{variable} must be https://host or https://host:port and nothing more")
    assert "hunter2" not in message


def test_settings_can_be_logged() -> None:
    assert "pa55" not in repr(settings())
    assert "batch_size=50" in repr(settings())


def test_a_lease_that_outlasts_the_function_by_more_than_the_margin_is_enough() -> None:
    check_lease(120, 109)
    check_lease(30, 19)


@pytest.mark.parametrize("timeout", [110, 109.982, 110.0])
def test_a_lease_that_a_slow_drain_could_outlive_is_refused(timeout: float) -> None:
    with pytest.raises(BadSettings) as caught:
        check_lease(120, timeout)

    assert str(caught.value) == (
        "LEASE_SECONDS (120) must be more than the function's timeout (110 s) plus a margin of 10 s:"
        " set LEASE_SECONDS to at least 121, or the timeout to at most 109 s"
    )
