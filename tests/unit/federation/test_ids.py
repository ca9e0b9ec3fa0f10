"""Names of runs, sites and messages."""

import pytest

from federation import ids


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A",
        "-a",
        "a-",
        ".a",
        "a.",
        "a..b",
        "a/b",
        "a b",
        "a\n",
        "\u00e4",
        "\u0661",
        "x" * 65,
        "../etc/passwd",
    ],
)
def test_other_text_is_no_name(text: str):
    """Nothing that could leave a folder or clash in a bucket is a name."""
    with pytest.raises(ValueError, match="is not a name"):
        ids.check_name(text)


def test_run_is_named_by_its_start_in_utc():
    """Runs sort by their start, and the name may be a key in a store."""
    run_id = ids.new_run_id(1_767_323_045.9, b"\xa1\xb2\xc3\xd4")
    assert run_id == "20260102-030405-a1b2c3"
    assert ids.check_name(run_id) == run_id


def test_message_id_is_the_same_for_a_retry():
    """The identifier of a message depends on what it is about and is frozen."""
    expected = "426ee4e9a5aa759453ef74862d46f76d"
    assert ids.message_id("run", 3, "site", "train") == expected


def test_message_ids_differ_between_messages():
    """Neither another field nor another split of the same letters collides."""
    about = [
        ("run", 1, "a", "train"),
        ("run", 2, "a", "train"),
        ("run", 1, "b", "train"),
        ("run", 1, "a", "evaluate"),
        ("ru", 1, "na", "train"),
        ("run2", 1, "a", "train"),
    ]
    assert len({ids.message_id(*item) for item in about}) == len(about)
