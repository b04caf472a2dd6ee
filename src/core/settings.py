"""What may be configured, read and checked once, before anything is opened or a row is touched."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

# What must remain of a lease beyond the function's timeout: time for a killed drain's last write to land or fail,
# and for two clocks (Lambda's for the timeout, Postgres's for the lease) to differ.
LEASE_MARGIN_SECONDS = 10

# libpq's own grammar. Checked here because libpq, when it cannot read a URL, quotes it: its error holds the password.
_HOST = r"(\[[^\]\s]*\]|[^\[\]:@/?,\s]*)(:[0-9]*)?"
_LIBPQ_URL = re.compile(rf"postgres(ql)?://([^@/\s]*@)?{_HOST}(,{_HOST})*(/[^?\s]*)?(\?[^\s]*)?")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
# A host alone; the pattern refuses what people paste there, `host:5432` and whole URLs.
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
_ORIGIN = re.compile(r"https://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?/?", re.IGNORECASE)


class BadSettings(Exception):  # noqa: N818  the name says what is so; an "Error" behind it would say nothing more
    """The environment does not say what we need to know. Names every fault, not the first."""


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    url: str = field(repr=False)  # it may hold a password


@dataclass(frozen=True, slots=True, kw_only=True)
class RdsIam:
    host: str
    port: int
    name: str
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RdsSecret:
    host: str
    port: int
    name: str
    user: str | None  # without one, the secret's own
    secret_id: str


type Database = DatabaseUrl | RdsIam | RdsSecret


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    database: Database
    apns_secret_id: str | None
    apns_production_url: str
    apns_sandbox_url: str
    apns_ca_file: str | None
    batch_size: int
    max_batches: int
    lease_seconds: int
    max_attempts: int
    backoff_base_seconds: int
    backoff_cap_seconds: int
    give_back_hours: int

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        read = _Reading(env)
        settings = cls(
            database=read.database(),
            apns_secret_id=read.text("APNS_SECRET_ID"),
            apns_production_url=read.origin("APNS_PRODUCTION_URL", "https://api.push.apple.com"),
            apns_sandbox_url=read.origin("APNS_SANDBOX_URL", "https://api.sandbox.push.apple.com"),
            apns_ca_file=read.text("APNS_CA_FILE"),
            # The burst of one tick, and one UPDATE's worth of row locks: beyond a thousand neither is bounded.
            batch_size=read.whole("DRAIN_BATCH_SIZE", 50, 1, 1000),
            max_batches=read.whole("DRAIN_MAX_BATCHES", 1, 1, 1000),
            # Below 30 s no push fits in (10 s of margin, 8 s for an answer). Above 12 h a crash costs half a day.
            lease_seconds=read.whole("LEASE_SECONDS", 120, 30, 43_200),
            max_attempts=read.whole("MAX_ATTEMPTS", 5, 1, 100),
            backoff_base_seconds=read.whole("BACKOFF_BASE_SECONDS", 60, 1, 86_400),
            # A week: who waits longer has lost the notification.
            backoff_cap_seconds=read.whole("BACKOFF_CAP_SECONDS", 3600, 1, 604_800),
            give_back_hours=read.whole("GIVE_BACK_HOURS", 72, 1, 8760),
        )
        backoff = {"BACKOFF_BASE_SECONDS", "BACKOFF_CAP_SECONDS"}
        if settings.backoff_cap_seconds < settings.backoff_base_seconds and not backoff & read.faults.keys():
            read.faults["BACKOFF_CAP_SECONDS"] = (
                f"BACKOFF_CAP_SECONDS ({settings.backoff_cap_seconds}) must not be less than"
                f" BACKOFF_BASE_SECONDS ({settings.backoff_base_seconds}): raise the cap or lower the base"
            )
        if read.faults:
            raise BadSettings("; ".join(read.faults.values()))
        return settings


def check_lease(lease_seconds: int, function_timeout_seconds: float) -> None:
    """Refuse a lease that could end while the drain that holds it still runs: another would push the same rows."""
    # Timeouts are whole seconds, but what is left of one when somebody asks is already a hair less.
    timeout = math.ceil(function_timeout_seconds)
    if lease_seconds <= timeout + LEASE_MARGIN_SECONDS:
        raise BadSettings(
            f"LEASE_SECONDS ({lease_seconds}) must be more than the function's timeout ({timeout} s)"
            f" plus a margin of {LEASE_MARGIN_SECONDS} s: set LEASE_SECONDS to at least"
            f" {timeout + LEASE_MARGIN_SECONDS + 1}, or the timeout to at most"
            f" {lease_seconds - LEASE_MARGIN_SECONDS - 1} s"
        )


class _Reading:
    """One pass over the environment. A bad value becomes a fault and its default, so that the pass goes on."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.faults: dict[str, str] = {}  # by variable

    def text(self, name: str) -> str | None:
        # Blank is unset: a template that passes an empty parameter has no way to leave the variable out.
        return self._env.get(name, "").strip() or None

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        value = self.text(name)
        if value is None:
            return default
        # ASCII digits only: int() also takes "+5", "5_0" and other scripts' digits. Nine: it raises at thousands.
        if re.fullmatch(r"[0-9]{1,9}", value) and low <= int(value) <= high:
            return int(value)
        self.faults[name] = f"{name} must be a whole number from {low} to {high}, not {value!r}"
        return default

    def origin(self, name: str, default: str) -> str:
        value = self.text(name) or default
        match = _ORIGIN.fullmatch(value)
        if not match or (match["port"] and not 1 <= int(match["port"]) <= 65_535):
            # Without the value: a URL may carry a password.
            self.faults[name] = (
                f"{name} must be https://host or https://host:port and nothing more (no user, path or query);"
                f" leave it unset for {default}"
            )
            return default
        return value.rstrip("/")

    def database(self) -> Database:
        if url := self.text("DATABASE_URL"):
            return self._database_url(url)
        auth = self.text("DB_AUTH") or "iam"
        # With a secret the user is the secret's, unless DB_USER names another.
        needed = ("DB_HOST", "DB_NAME", "DB_SECRET_ID" if auth == "secret" else "DB_USER")
        if missing := [name for name in needed if self.text(name) is None]:
            self.faults["DATABASE_URL"] = (
                f"the database is not named (DB_AUTH is {auth!r}): set {', '.join(missing)}, or DATABASE_URL instead"
            )
        host, name, user = (self.text(variable) or "" for variable in ("DB_HOST", "DB_NAME", "DB_USER"))
        port = self.whole("DB_PORT", 5432, 1, 65_535)
        if host and not _HOST_NAME.fullmatch(host):
            self.faults["DB_HOST"] = "DB_HOST must be a host's name alone, without scheme, user or port (set DB_PORT)"
        match auth:
            case "iam":
                return RdsIam(host=host, port=port, name=name, user=user)
            case "secret":
                secret_id = self.text("DB_SECRET_ID") or ""
                return RdsSecret(host=host, port=port, name=name, user=user or None, secret_id=secret_id)
            case _:
                self.faults["DB_AUTH"] = f"DB_AUTH must be iam or secret, not {auth!r}"
                return DatabaseUrl("")

    def _database_url(self, url: str) -> DatabaseUrl:
        fault = None
        if not url.startswith(("postgresql://", "postgres://")):
            fault = "DATABASE_URL must begin with postgresql:// (it is not shown here, since it may hold a password)"
        elif _STRAY_PERCENT.search(url):
            fault = "DATABASE_URL has a % that two hexadecimal digits do not follow: write a % of the password as %25"
        elif not _LIBPQ_URL.fullmatch(url):
            fault = (
                "DATABASE_URL must be postgresql://user:password@host:port/name; where user or password hold"
                " one of @ / ? [ ] or a space, write it as % and two hexadecimal digits (%40 for @)"
            )
        if fault:
            self.faults["DATABASE_URL"] = fault
        return DatabaseUrl(url)
