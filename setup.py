"""Packaging of holmes_ext.

Two things are unusual. `patches/` at the top of the tree is installed as the package
`holmes_ext.patches`. And a one-line `holmes_ext.pth` lands at the root of site-packages, in a wheel
as in an editable install: it is what makes `--holmes` work on an unmodified script (see
holmes_ext/_pth.py). It is a data file, whose installer (install_data) serves both kinds of install.

The bare install depends on small pure libraries only: it must never disturb a training stack.
"""

import re
from distutils.command.install_data import install_data  # setuptools', which it puts in distutils's place
from pathlib import Path

from setuptools import Distribution, find_packages, setup

HERE = Path(__file__).parent
#: patches/ of the tree. (holmes_ext/patches is a link to it, for type checkers and editors; an sdist has none.)
PATCHES = ["holmes_ext.patches", *(f"holmes_ext.patches.{name}" for name in find_packages("patches"))]


class InstallPth(install_data):
    """Installs data_files at the root of site-packages instead of the environment's prefix."""

    def finalize_options(self):
        self.set_undefined_options("install", ("install_lib", "install_dir"), ("root", "root"), ("force", "force"))


class DistributionWithData(Distribution):
    """An editable install runs install_data only when has_data() says so, which setuptools forgot to define."""

    def has_data(self):
        return self.has_data_files()


setup(
    distclass=DistributionWithData,
    name="holmes_ext",
    version=re.search(r'__version__ = "([^"]+)"', (HERE / "holmes_ext" / "__init__.py").read_text())[1],
    description="One LLM training job over several GPU clusters whose NICs differ",
    python_requires=">=3.10",
    packages=[*find_packages(include=["holmes_ext*"], exclude=["holmes_ext.patches*"]), *PATCHES],
    package_dir={"holmes_ext.patches": "patches"},
    package_data={"": ["*"], "holmes_ext.lab.emulate": ["site/*"]},
    data_files=[("", ["holmes_ext.pth"])],
    cmdclass={"install_data": InstallPth},
    entry_points={"console_scripts": ["holmes = holmes_ext.cli.main:main"]},
    install_requires=["wrapt>=1.14", "packaging>=21", "rich>=12", 'tomli>=1.1; python_version < "3.11"'],
    extras_require={
        "deepspeed": ["deepspeed>=0.19"],
        "megatron": ["megatron-core>=0.14"],
        "lab": ["psutil"],
        "plot": ["matplotlib"],
        "test": ["pytest", "pytest-timeout", "scipy", "matplotlib", "psutil"],
    },
)
