import pytest

from core.answer import Rejected
from core.reasons import BY_STATUS, REASONS, Blame, blame, blames_the_topic, describe

DEVICE, NOTIFICATION, PROVIDER, APNS = Blame.DEVICE, Blame.NOTIFICATION, Blame.PROVIDER, Blame.APNS

# Apple's page, "Handling notification responses from APNs": every reason with its status. Copied from there and not
# from our table, and beside it what we make of each.
APPLES = [
    (400, "BadCollapseId", NOTIFICATION),
    (400, "BadDeviceToken", DEVICE),
    (400, "BadExpirationDate", NOTIFICATION),
    (400, "BadMessageId", NOTIFICATION),
    (400, "BadPriority", NOTIFICATION),
    (400, "BadTopic", PROVIDER),
    (400, "DeviceTokenNotForTopic", DEVICE),
    (400, "DuplicateHeaders", NOTIFICATION),
    (400, "IdleTimeout", APNS),
    (400, "InvalidPushType", NOTIFICATION),
    (400, "MissingDeviceToken", NOTIFICATION),
    (400, "MissingTopic", PROVIDER),
    (400, "PayloadEmpty", NOTIFICATION),
    (400, "TopicDisallowed", PROVIDER),
    (403, "BadCertificate", PROVIDER),
    (403, "BadCertificateEnvironment", PROVIDER),
    (403, "BadEnvironmentKeyIdInToken", PROVIDER),  # as the page spells it
    (403, "BadEnvironmentKeyInToken", PROVIDER),  # as it comes over the wire
    (403, "ExpiredProviderToken", PROVIDER),
    (403, "Forbidden", PROVIDER),
    (403, "InvalidProviderToken", PROVIDER),
    (403, "MissingProviderToken", PROVIDER),
    (403, "UnrelatedKeyIdInToken", PROVIDER),
    (404, "BadPath", NOTIFICATION),
    (405, "MethodNotAllowed", NOTIFICATION),
    (410, "ExpiredToken", DEVICE),
    (410, "Unregistered", DEVICE),
    (413, "PayloadTooLarge", NOTIFICATION),
    (429, "TooManyProviderTokenUpdates", PROVIDER),
    (429, "TooManyRequests", APNS),
    (500, "InternalServerError", APNS),
    (503, "ServiceUnavailable", APNS),
    (503, "Shutdown", APNS),
]


@pytest.mark.parametrize(("status", "reason", "whose"), APPLES, ids=[reason for _, reason, _ in APPLES])
def test_each_of_apples_reasons_has_its_status_and_its_blame(status: int, reason: str, whose: Blame) -> None:
    assert REASONS[reason].status == status
    assert blame(Rejected(status, reason)) is whose


def test_the_table_holds_apples_reasons_and_no_others() -> None:
    assert sorted(REASONS) == sorted(reason for _, reason, _ in APPLES)


def test_every_403_blames_us() -> None:
    assert {row.blame for row in REASONS.values() if row.status == 403} == {PROVIDER}


def test_every_5xx_blames_apns() -> None:
    assert {row.blame for row in REASONS.values() if row.status >= 500} == {APNS}


@pytest.mark.parametrize(
    ("status", "whose"),
    [
        (400, NOTIFICATION),
        (403, PROVIDER),
        (404, NOTIFICATION),
        (405, NOTIFICATION),
        (410, DEVICE),
        (413, NOTIFICATION),
        (429, APNS),
        (500, APNS),
        (502, APNS),
        (503, APNS),
        (599, APNS),
        # Not APNs' at all: a proxy, or something else that listens there. It must end nothing.
        (0, APNS),
        (201, APNS),
        (302, APNS),
        (401, APNS),
        (407, APNS),
        (421, APNS),
    ],
)
@pytest.mark.parametrize("reason", ["TokenIsTooShiny", "", "badtopic", "status_000"])
def test_an_unknown_reason_is_judged_by_its_status(status: int, whose: Blame, reason: str) -> None:
    assert blame(Rejected(status, reason)) is whose


def test_a_reason_and_its_status_agree_on_the_blame_but_for_what_apple_files_oddly() -> None:
    odd = {name for name, row in REASONS.items() if row.blame is not BY_STATUS.get(row.status, APNS)}

    assert odd == {
        "BadDeviceToken", "DeviceTokenNotForTopic", "BadTopic", "MissingTopic", "TopicDisallowed", "IdleTimeout",
        "TooManyProviderTokenUpdates",
    }  # fmt: skip


def test_a_fault_of_the_topic_is_one_of_the_provider_that_leaves_other_topics_alone() -> None:
    of_the_topic = {name for name, row in REASONS.items() if blames_the_topic(Rejected(row.status, name))}

    assert of_the_topic == {"BadTopic", "MissingTopic", "TopicDisallowed"}
    assert {REASONS[name].blame for name in of_the_topic} == {PROVIDER}


def test_a_known_reason_means_the_same_under_a_status_that_apple_does_not_document_for_it() -> None:
    assert blame(Rejected(400, "Unregistered")) is DEVICE
    assert blame(Rejected(400, "ExpiredProviderToken")) is PROVIDER
    assert blame(Rejected(403, "TooManyRequests")) is APNS


def test_a_description_is_one_sentence_with_what_apns_said_and_what_it_means() -> None:
    assert (
        describe(Rejected(410, "Unregistered"))
        == "APNs answered 410 Unregistered: the device token is no longer active for the topic."
    )
    assert (
        describe(Rejected(400, "TokenIsTooShiny"))
        == "APNs answered 400 TokenIsTooShiny, which this version does not know."
    )


def test_what_we_know_beside_it_is_a_sentence_of_its_own() -> None:
    assert (
        describe(Rejected(403, "Forbidden", note="Our clock is 90 s behind APNs': mend it."))
        == "APNs answered 403 Forbidden: the action is not allowed. Our clock is 90 s behind APNs': mend it."
    )
    assert (
        describe(Rejected(403, "Shiny", note="Mend it."))
        == "APNs answered 403 Shiny, which this version does not know. Mend it."
    )


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_a_note_is_sentences_and_fits_a_cell_of_the_table(reason: str) -> None:
    note = REASONS[reason].note

    assert note == "" or (note[0].isupper() and note.endswith("."))
    assert not {"|", "\n"} & set(note + REASONS[reason].meaning)


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_a_meaning_fits_into_that_sentence(reason: str) -> None:
    meaning = REASONS[reason].meaning

    assert meaning == meaning.strip()
    assert meaning.isprintable()
    assert meaning[0].islower() or meaning.startswith("APNs")
    assert not meaning.endswith((".", "!", ":", ","))
    assert len(describe(Rejected(400, reason))) <= 500  # what last_error holds


@pytest.mark.parametrize(
    ("reason", "place"),
    [
        ("BadTopic", "topic"),
        ("MissingTopic", "secret"),
        ("TopicDisallowed", "team"),
        ("InvalidProviderToken", "secret"),
        ("ExpiredProviderToken", "clock"),
    ],
)
def test_what_a_person_has_to_mend_is_named(reason: str, place: str) -> None:
    assert place in describe(Rejected(400, reason))
