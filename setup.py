"""What is unusual about the packaging of holmes_ext; all else stands in pyproject.toml.

`patches/` at the top of the tree is installed as the package `holmes_ext.patches`, `examples/` as data in
`holmes_ext/examples`. And a one-line `holmes_ext.pth` lands at the root of site-packages, in a wheel as in an
editable install: it makes `--holmes` work on an unmodified script (see holmes_ext/_pth.py). It is a data
file, whose installer (install_data) serves both kinds of install.
"""

from distutils.command.install_data import (
    install_data,
)  # setuptools', which it puts in distutils's place

from setuptools import Distribution, find_packages, setup

#: patches/ of the tree. (holmes_ext/patches is a link to it, for type checkers and editors; an sdist has
#: none.)
PATCHES = [
    "holmes_ext.patches",
    *(f"holmes_ext.patches.{name}" for name in find_packages("patches")),
]
OWN = find_packages(include=["holmes_ext*"], exclude=["holmes_ext.patches*"])


class InstallPth(install_data):
    """Installs data_files at the root of site-packages instead of the environment's prefix."""

    def finalize_options(self):
        self.set_undefined_options(
            "install", ("install_lib", "install_dir"), ("root", "root"), ("force", "force")
        )


class DistributionWithData(Distribution):
    """Distribution whose editable install runs install_data, for which setuptools lacks `has_data`."""

    def has_data(self):
        return self.has_data_files()


setup(
    distclass=DistributionWithData,
    packages=[*OWN, *PATCHES, "holmes_ext.examples"],
    package_dir={"holmes_ext.patches": "patches", "holmes_ext.examples": "examples"},
    package_data={"": ["*"], "holmes_ext.examples": ["**/*"]},
    exclude_package_data={"": ["__pycache__/*", "**/__pycache__/*"]},
    data_files=[("", ["holmes_ext.pth"])],
    cmdclass={"install_data": InstallPth},
)
