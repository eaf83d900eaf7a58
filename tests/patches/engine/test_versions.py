"""Versions as people have them: a vendor's build, a nightly, a git checkout that tells none."""

import pytest
from packaging.version import Version

from holmes_ext.patches import all_patches
from holmes_ext.patches.engine.patch import UNKNOWN, Feature, Patch, release_of

VENDOR, NIGHTLY = "2.7.0a0+79aa17489c.nv25.4", "2.16.0.dev20261101+cu132"
SILENT = ("0+unknown", "0.0.0", "0.1.dev1+g1234567", "unknown", "")


def test_a_version_is_the_release_that_it_will_be():
    assert (release_of(VENDOR), release_of(NIGHTLY), release_of("0.20.0rc1")) == tuple(
        map(Version, ("2.7.0", "2.16.0", "0.20.0"))
    )
    assert {release_of(version) for version in SILENT} == {UNKNOWN}


@pytest.mark.parametrize(
    "version, misfit, told",
    [
        (VENDOR, None, ""),
        ("2.15.3", None, ""),
        ("2.5.1", "torch 2.5.1 is not supported (needs >=2.6)", ""),
        (
            NIGHTLY,
            None,
            f"torch {NIGHTLY} is newer than 2.15.0, the newest that was tried; "
            "holmes patches what looks as expected",
        ),
        *(
            (
                version,
                None,
                f"torch {version} names no release; holmes patches what looks as expected",
            )
            for version in SILENT
        ),
    ],
)
def test_what_is_supported_and_what_is_told(version, misfit, told):
    feature = Feature("f", "torch>=2.6", tried=("2.6.0", "2.15.0"))
    assert (feature.version_misfit(version), feature.warning_if_newer_than_tried(version)) == (
        misfit,
        told,
    )


def test_patches_of_some_versions():
    feature = Feature("f", "torch>=2.6", tried=("2.15.0",))
    old = Patch(feature, target="torch:send", reason="", wrap=print, only="<2.7")
    new = Patch(feature, target="torch:send", reason="", wrap=print, only=">=2.7")
    assert (old.is_for_version("2.6.0"), new.is_for_version("2.6.0")) == (True, False)
    for version in (VENDOR, "0+unknown"):  # an unknown version counts as the newest
        assert (old.is_for_version(version), new.is_for_version(version)) == (False, True)
    assert old.is_for_version(None)
    assert new.is_for_version(None)


def test_every_end_of_a_range_was_tried_or_read():
    """Of each feature the oldest release that it takes, and one of the newest."""
    for feature in {one.feature for one in all_patches()}:
        known = [Version(version) for version in (*feature.tried, *feature.read)]
        assert known and all(feature.version_misfit(str(version)) is None for version in known), (
            feature.name
        )
